// Rows of arrays in memory, in the type that a program computes in.
#ifndef OSTINATO_CPU_STEP_ARRAYS_H_
#define OSTINATO_CPU_STEP_ARRAYS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/step/loop.h"

namespace ostinato::cpu {

inline float FromBFloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

inline uint16_t ToBFloat16(float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return static_cast<uint16_t>((bits | 0x400000) >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
void CopyElements(const T* from, int64_t count, T* to) {
  std::copy_n(from, count, to);
}

template <typename T>
void CopyElements(const uint16_t* from, int64_t count, T* to) {
  std::transform(from, from + count, to, FromBFloat16);
}

template <typename T>
void CopyElements(const T* from, int64_t count, uint16_t* to) {
  std::transform(from, from + count, to,
                 [](T x) { return ToBFloat16(static_cast<float>(x)); });
}

// Some rows of an array, row `first + at[r]` for each r.
struct ArrayRows {
  const int64_t* at;
  int64_t first, count, width;
};

// Calls `run(r, element, width)` for each row r, which begins with that element. The
// compiler knows the width of narrow rows: calls would take longer than their copies.
template <typename Run>
void ForEachRow(const ArrayRows& rows, const Run& run) {
  const auto of_width = [&](auto width) {
    for (int64_t r = 0; r < rows.count; ++r) {
      run(r, (rows.first + rows.at[r]) * width, width);
    }
  };
  switch (rows.width) {
    case 1:
      return of_width(std::integral_constant<int64_t, 1>());
    case 2:
      return of_width(std::integral_constant<int64_t, 2>());
    case 3:
      return of_width(std::integral_constant<int64_t, 3>());
    case 4:
      return of_width(std::integral_constant<int64_t, 4>());
    case 8:
      return of_width(std::integral_constant<int64_t, 8>());
    case 16:
      return of_width(std::integral_constant<int64_t, 16>());
    default:
      return of_width(rows.width);
  }
}

// Calls `run` with the elements of an array, of type T or in bfloat16.
template <typename T, typename Run>
void WithElements(const StepArray& array, const Run& run) {
  if (array.bytes == sizeof(T)) {
    run(static_cast<T*>(array.data));
  } else {
    run(static_cast<uint16_t*>(array.data));
  }
}

template <typename T>
void ReadRows(const StepArray& array, const ArrayRows& rows, T* to) {
  WithElements<T>(array, [&](const auto* elements) {
    ForEachRow(rows, [&](int64_t r, int64_t element, auto width) {
      CopyElements(elements + element, width, to + r * width);
    });
  });
}

template <typename T>
void WriteRows(const StepArray& array, const ArrayRows& rows, const T* from) {
  WithElements<T>(array, [&](auto* elements) {
    ForEachRow(rows, [&](int64_t r, int64_t element, auto width) {
      CopyElements(from + r * width, width, elements + element);
    });
  });
}

template <typename T>
void ClearRows(const StepArray& array, const ArrayRows& rows) {
  WithElements<T>(array, [&](auto* elements) {
    ForEachRow(rows, [&](int64_t, int64_t element, auto width) {
      std::fill_n(elements + element, int64_t{width}, 0);
    });
  });
}

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_ARRAYS_H_
