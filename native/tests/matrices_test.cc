// Blocks of matrices in the flat vector, there and back, against plain loops.
#include "cpu/network/matrices.h"

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "tests/check.h"

namespace {

using ostinato::cpu::CopyRows;
using ostinato::cpu::Direction;
using ostinato::cpu::RowBlock;
using ostinato::cpu::Team;

// Two blocks of one matrix by column, in the other order, and one row by row between.
template <typename T>
void Check(int64_t rows, int64_t columns, int64_t first_rows, int32_t threads) {
  std::vector<T> by_column(rows * columns), by_row(7 * columns);
  for (size_t i = 0; i < by_column.size(); ++i) by_column[i] = static_cast<T>(i % 1021);
  for (size_t i = 0; i < by_row.size(); ++i) by_row[i] = static_cast<T>(i + 2000);
  const int64_t rest = rows - first_rows, size = (rows + 7) * columns;
  const auto blocks = [&](std::vector<T>& a, std::vector<T>& b) {
    char* const matrix = reinterpret_cast<char*>(a.data());
    return std::vector<RowBlock>{
        {rest, columns, 0, true, rows, matrix + first_rows * sizeof(T)},
        {7, columns, rest * columns, false, columns, reinterpret_cast<char*>(b.data())},
        {first_rows, columns, (rest + 7) * columns, true, rows, matrix}};
  };
  std::vector<T> want;
  for (int64_t r = first_rows; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) want.push_back(by_column[c * rows + r]);
  want.insert(want.end(), by_row.begin(), by_row.end());
  for (int64_t r = 0; r < first_rows; ++r)
    for (int64_t c = 0; c < columns; ++c) want.push_back(by_column[c * rows + r]);

  Team team(threads);
  std::vector<T> vector(size), again(by_column.size()), row_again(by_row.size());
  char* const data = reinterpret_cast<char*>(vector.data());
  CopyRows(Direction::kJoin, blocks(by_column, by_row), sizeof(T), data, team);
  CHECK_EQ(vector == want, true);
  CopyRows(Direction::kSplit, blocks(again, row_again), sizeof(T), data, team);
  CHECK_EQ(again == by_column, true);
  CHECK_EQ(row_again == by_row, true);
}

template <typename T>
void CheckSizes() {
  for (const int32_t threads : {1, 3}) {
    Check<T>(1, 1, 0, threads);
    Check<T>(5, 3, 2, threads);
    Check<T>(33, 17, 32, threads);
    Check<T>(700, 65, 37, threads);
  }
}

void CheckOtherSizes() {
  Team team(1);
  bool thrown = false;
  try {
    CopyRows(Direction::kJoin, {}, 3, nullptr, team);
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  CHECK_EQ(thrown, true);
}

}  // namespace

int main() {
  CheckSizes<uint16_t>();
  CheckSizes<float>();
  CheckSizes<double>();
  CheckOtherSizes();
  return ostinato::testing::Summary();
}
