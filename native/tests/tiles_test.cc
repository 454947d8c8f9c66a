// The instructions themselves: the compiled table of avx512_amx gives the bits of the
// emulated one. A processor without them stops at each; a handler then does what the
// instruction says, registers and addresses taken from its code. So names of registers
// and the order of operands in tiles_amx.h are checked on any processor with the
// vectors of avx512_bf16.
#include <cstring>
#include <iostream>

#include "tests/check.h"
#include "tests/kernels_products.h"
#include "tests/tiles_emulated.h"

#if defined(__linux__) && defined(__x86_64__)

#include <signal.h>
#include <ucontext.h>

namespace {

using namespace ostinato::testing;
using ostinato::cpu::Isa;
using ostinato::cpu::KernelsBf16Pairs;

int64_t trapped = 0;

// Fields of an instruction of three-byte VEX form in 0F38.
struct Instruction {
  uint8_t opcode, prefix, modrm;
  int reg, rm, third;  // registers, where they are such
  uint64_t address;    // of the memory operand: base and displacement
  int64_t stride;      // what its index holds, scaled
  int length;
};

uint64_t Register(const ucontext_t& context, int number) {
  constexpr int kPlaces[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                             REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                             REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[kPlaces[number]];
}

// False if it is none of ours.
bool Decode(const ucontext_t& context, Instruction* found) {
  const auto* code =
      reinterpret_cast<const uint8_t*>(context.uc_mcontext.gregs[REG_RIP]);
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2) return false;
  const bool high_reg = !(code[1] & 0x80), high_index = !(code[1] & 0x40),
             high_rm = !(code[1] & 0x20);
  Instruction i{};
  i.third = ~code[2] >> 3 & 15;
  i.prefix = code[2] & 3;
  i.opcode = code[3];
  i.modrm = code[4];
  i.reg = (i.modrm >> 3 & 7) + 8 * high_reg;
  i.rm = (i.modrm & 7) + 8 * high_rm;
  i.length = 5;
  const int mod = i.modrm >> 6;
  if (mod != 3) {
    int base = i.rm;
    if ((i.modrm & 7) == 4) {
      const uint8_t sib = code[i.length++];
      const int index = (sib >> 3 & 7) + 8 * high_index;
      base = (sib & 7) + 8 * high_rm;
      if (index != 4) {
        i.stride = static_cast<int64_t>(Register(context, index)) << (sib >> 6);
      }
    }
    if (mod == 0 && (base & 7) == 5) return false;  // no form that compilers chose
    i.address = Register(context, base);
    if (mod == 1) {
      i.address += static_cast<int8_t>(code[i.length++]);
    } else if (mod == 2) {
      int32_t displacement;
      std::memcpy(&displacement, code + i.length, sizeof displacement);
      i.address += displacement;
      i.length += 4;
    }
  }
  *found = i;
  return true;
}

bool Emulate(const Instruction& i) {
  auto* memory = reinterpret_cast<void*>(i.address);
  const int key = i.opcode << 8 | i.prefix;
  if (key == 0x4900 && i.modrm == 0xc0) {
    ostinato_emulate_release();
  } else if (key == 0x4900) {
    ostinato_emulate_set_up(memory);
  } else if (key == 0x4b03 ||
             key == 0x4b01) {  // the second one keeps nothing in a cache
    ostinato_emulate_load(i.reg, memory, i.stride);
  } else if (key == 0x4b02) {
    ostinato_emulate_store(i.reg, memory, i.stride);
  } else if (key == 0x5c02) {
    ostinato_emulate_product(i.reg, i.rm, i.third);
  } else {
    return false;
  }
  return true;
}

void OnIllegalInstruction(int, siginfo_t*, void* where) {
  auto& context = *static_cast<ucontext_t*>(where);
  Instruction instruction;
  if (!Decode(context, &instruction) || !Emulate(instruction)) {
    signal(SIGILL, SIG_DFL);  // comes again, and ends the program
    return;
  }
  context.uc_mcontext.gregs[REG_RIP] += instruction.length;
  ++trapped;
}

// Products of both tables on the same values.
void CheckSameBits(const KernelsBf16Pairs& tiles, const Shape& shape, int64_t rows,
                   int64_t depth, bool starts, bool even) {
  constexpr int64_t kLanes = 16;
  const int64_t width = shape.row_vectors * kLanes, stride = width + 3;
  Random random;
  Rows<BFloat16> a(rows, depth, even);
  for (BFloat16* row : a.rows) {
    for (int64_t k = 0; k < depth; ++k) row[k] = Make<BFloat16>(random.Uniform(-1, 1));
  }
  Guarded<BFloat16> panel((depth + 1) / 2 * 2 * shape.panel_vectors * kLanes);
  Guarded<float> start(width), got((rows - 1) * stride + width), want(got.size());
  random.Fill(panel, 1);
  random.Fill(start, 1);
  random.Fill(got, 1);
  std::memcpy(want.data(), got.data(), got.size() * sizeof(float));
  for (const bool real : {true, false}) {
    const KernelsBf16Pairs& table = real ? tiles : *ostinato_emulated_tiles();
    table.product[static_cast<int>(shape.panel_shape)](
        a.pointers.data(), 0, rows, depth, panel.data(), nullptr,
        starts ? start.data() : nullptr, (real ? got : want).data(), stride);
    table.release_tiles();
  }
  for (int64_t i = 0; i < got.size(); ++i) ExpectExact(got[i], want[i], "sum");
}

}  // namespace

int main() {
  const auto& set = ostinato::cpu::KernelsFor(Isa::kAvx512Amx);
  if (set.bf16_tiles == nullptr || ostinato::cpu::DetectIsa() < Isa::kAvx512Bf16) {
    std::cout << "skipped tiles: not compiled, or no AVX512_BF16\n";
    return Summary();
  }
  struct sigaction action = {};
  action.sa_sigaction = OnIllegalInstruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
  table_name = "avx512_amx";
  for (const Shape& shape : kShapes) {
    for (const int64_t rows : {1, 15, 16, 17, 32, 33}) {
      for (const int64_t depth : {32, 96, 101}) {
        for (const bool starts : {false, true}) {
          CheckSameBits(*set.bf16_tiles, shape, rows, depth, starts, rows % 2 == 0);
        }
      }
    }
  }
  CHECK_EQ(ostinato_threads_with_tiles(), 0);
  const char* reason = ostinato::cpu::WhyNoTiles();
  std::cout << (reason == nullptr ? "the processor's own tiles" : reason) << ", "
            << trapped << " instructions emulated\n";
  CHECK_EQ(trapped > 0, reason != nullptr);
  return Summary();
}

#else

int main() {
  std::cout << "skipped tiles: not Linux on x86\n";
  return ostinato::testing::Summary();
}

#endif
