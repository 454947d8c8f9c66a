// Loops over a step. What follows this text is made of a step; see _step/cuda/text.py.
// Each thread runs one element of the states, from the first step to the last.

// What a launch is told.
struct Loop {
  Index batch, steps;
  Index reverse;  // the last step runs first
};

OSTINATO_DEVICE bool Widen(unsigned char x) { return x != 0; }
OSTINATO_DEVICE int Widen(int x) { return x; }
OSTINATO_DEVICE unsigned Widen(unsigned x) { return x; }

// Stores a value as its array holds it.
OSTINATO_DEVICE void Put(float* p, float x) { Store(p, x); }
OSTINATO_DEVICE void Put(double* p, double x) { Store(p, x); }
OSTINATO_DEVICE void Put(int* p, int x) { Store(p, x); }
OSTINATO_DEVICE void Put(unsigned* p, unsigned x) { Store(p, x); }
OSTINATO_DEVICE void Put(unsigned char* p, bool x) {
  Store(p, static_cast<unsigned char>(x));
}
OSTINATO_DEVICE void Put(BFloat16* p, float x) {
  BFloat16 narrow;
  Narrow(x, &narrow);
  Store(p, narrow);
}

// The value that bfloat16 has of it.
OSTINATO_DEVICE float Rounded(float x) {
  BFloat16 narrow;
  Narrow(x, &narrow);
  return Widen(narrow);
}

// The functions of XLA. Maximum and minimum are NaN where one operand is.
#define OSTINATO_FUNCTION(Name, of_float, of_double)          \
  OSTINATO_DEVICE float Name(float x) { return of_float(x); } \
  OSTINATO_DEVICE double Name(double x) { return of_double(x); }
OSTINATO_FUNCTION(Abs, fabsf, fabs)
OSTINATO_FUNCTION(Acos, acosf, acos)
OSTINATO_FUNCTION(Acosh, acoshf, acosh)
OSTINATO_FUNCTION(Asin, asinf, asin)
OSTINATO_FUNCTION(Asinh, asinhf, asinh)
OSTINATO_FUNCTION(Atan, atanf, atan)
OSTINATO_FUNCTION(Atanh, atanhf, atanh)
OSTINATO_FUNCTION(Cbrt, cbrtf, cbrt)
OSTINATO_FUNCTION(Ceil, ceilf, ceil)
OSTINATO_FUNCTION(Cos, cosf, cos)
OSTINATO_FUNCTION(Cosh, coshf, cosh)
OSTINATO_FUNCTION(Erf, erff, erf)
OSTINATO_FUNCTION(Erfc, erfcf, erfc)
OSTINATO_FUNCTION(Exp, expf, exp)
OSTINATO_FUNCTION(Expm1, expm1f, expm1)
OSTINATO_FUNCTION(Floor, floorf, floor)
OSTINATO_FUNCTION(Log, logf, log)
OSTINATO_FUNCTION(Log1p, log1pf, log1p)
OSTINATO_FUNCTION(PowerOf2, exp2f, exp2)
OSTINATO_FUNCTION(RoundAway, roundf, round)
OSTINATO_FUNCTION(RoundEven, rintf, rint)
OSTINATO_FUNCTION(Sin, sinf, sin)
OSTINATO_FUNCTION(Sinh, sinhf, sinh)
OSTINATO_FUNCTION(Sqrt, sqrtf, sqrt)
OSTINATO_FUNCTION(Tan, tanf, tan)
OSTINATO_FUNCTION(Tanh, tanhf, tanh)
#undef OSTINATO_FUNCTION
#define OSTINATO_FUNCTION(Name, of_float, of_double)                      \
  OSTINATO_DEVICE float Name(float x, float y) { return of_float(x, y); } \
  OSTINATO_DEVICE double Name(double x, double y) { return of_double(x, y); }
OSTINATO_FUNCTION(Atan2, atan2f, atan2)
OSTINATO_FUNCTION(Pow, powf, pow)
OSTINATO_FUNCTION(Rem, fmodf, fmod)
#undef OSTINATO_FUNCTION

OSTINATO_DEVICE int Rem(int x, int y) { return y == 0 ? x : y == -1 ? 0 : x % y; }
OSTINATO_DEVICE unsigned Rem(unsigned x, unsigned y) { return y == 0 ? x : x % y; }
// The nearest integer towards 0 that there is; 0 of NaN.
template <typename T>
OSTINATO_DEVICE int ToInt(T x) {
  if (x != x) return 0;
  if (x >= T(2147483648.0)) return 2147483647;
  return x <= T(-2147483648.0) ? -2147483647 - 1 : int(x);
}
template <typename T>
OSTINATO_DEVICE unsigned ToUnsigned(T x) {
  if (x >= T(4294967296.0)) return 4294967295u;
  return x > T(0) ? unsigned(x) : 0u;
}

template <typename T>
OSTINATO_DEVICE T Logistic(T x) {
  return T(1) / (T(1) + Exp(-x));
}
template <typename T>
OSTINATO_DEVICE T Rsqrt(T x) {
  return T(1) / Sqrt(x);
}
template <typename T>
OSTINATO_DEVICE T Sign(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : x;  // of a zero and NaN, itself
}
template <typename T>
OSTINATO_DEVICE bool IsFinite(T x) {
  return x - x == T(0);
}
template <typename T>
OSTINATO_DEVICE T Max(T x, T y) {
  return x >= y || x != x ? x : y;
}
template <typename T>
OSTINATO_DEVICE T Min(T x, T y) {
  return x <= y || x != x ? x : y;
}
