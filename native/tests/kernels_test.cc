// Every function of every table that this machine can run.
#include "cpu/kernels/kernels.h"

#include <cstring>

#include "cpu/runtime/fp_state.h"
#include "tests/kernels_cells.h"
#include "tests/kernels_products.h"
#include "tests/kernels_slstm.h"
#include "tests/kernels_steps.h"

namespace {

void EveryLevelHasTables() {
  for (int level = 0; level <= 4; ++level) {
    const auto& set = ostinato::cpu::KernelsFor(static_cast<ostinato::cpu::Isa>(level));
    CHECK_EQ(set.f32 != nullptr && set.f64 != nullptr && set.bf16 != nullptr, true);
    CHECK_EQ(set.bf16_pairs != nullptr && level < 3, false);
    CHECK_EQ(set.bf16_tiles != nullptr && level < 4, false);
  }
}

// Where pairs are slow, floats give the same results, of tiny numbers and of none too.
void WidenedProductsHaveTheBitsOfPairs() {
  using namespace ostinato::testing;
  constexpr auto kLevel = ostinato::cpu::Isa::kAvx512Bf16;
  if (ostinato::cpu::DetectIsa() < kLevel) return;
  const ostinato::cpu::FlushDenormals flush;  // as in every call; pairs always do
  constexpr int64_t kLanes = 16, kOffset = 2, kRows = 49;
  for (const Shape& shape : kShapes) {
    const int64_t width = shape.row_vectors * kLanes, stride = width + 3;
    for (const int64_t depth : {1, 2, 63, 64, 65, 131}) {
      Random random;
      Rows<BFloat16> a(kRows, kOffset + depth);
      for (BFloat16* row : a.rows) {
        for (int64_t k = 0; k < depth; ++k) {
          const double size = k % 5 == 0 ? 1e-20 : 1;  // products that are denormal
          row[kOffset + k] = Make<BFloat16>(size * random.Uniform(-1, 1));
        }
      }
      Guarded<BFloat16> panel((depth + 1) / 2 * 2 * shape.panel_vectors * kLanes);
      random.Fill(panel, 1);
      for (int64_t i = 0; i < panel.size(); i += 7) panel[i] = {0x0001};
      for (int64_t i = 3; i < panel.size(); i += 7) panel[i] = Make<BFloat16>(1e-20);
      if (depth == 131) random.FillWithSpecials(panel, 1);
      Guarded<float> start(width);
      random.Fill(start, 1e-20);
      for (const int64_t rows : {4, 5, 24, 25, 49}) {
        Guarded<float> pairs(rows * stride), widened(rows * stride);
        random.Fill(pairs, 1e-20);
        std::memcpy(widened.data(), pairs.data(), pairs.size() * sizeof(float));
        for (const bool slow : {false, true}) {
          const auto& table = *ostinato::cpu::KernelsFor(kLevel, slow).bf16_pairs;
          table.product[static_cast<int>(shape.panel_shape)](
              a.pointers.data(), kOffset, rows, depth, panel.data(), nullptr,
              rows % 2 == 0 ? start.data() : nullptr, (slow ? widened : pairs).data(),
              stride);
        }
        table_name = "widened";
        for (int64_t i = 0; i < pairs.size(); ++i) {
          ExpectExact(widened[i], pairs[i], "sum");
        }
      }
    }
  }
}

}  // namespace

int main() {
  EveryLevelHasTables();
  WidenedProductsHaveTheBitsOfPairs();
  ostinato::testing::ForEachTable([](const auto& table) {
    CheckProducts(table);
    CheckMoves(table);
    CheckAccuracy(table);
    CheckCells(table);
    CheckSlstms(table);
  });
  ostinato::testing::CheckStepOperations();
  return ostinato::testing::Summary();
}
