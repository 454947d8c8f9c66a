// Every function of every table that this machine can run.
#include "cpu/kernels/kernels.h"

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

}  // namespace

int main() {
  EveryLevelHasTables();
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
