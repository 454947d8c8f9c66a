// Products, panels, transposes and dot products against plain loops in double.
#ifndef OSTINATO_TESTS_KERNELS_PRODUCTS_H_
#define OSTINATO_TESTS_KERNELS_PRODUCTS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/kernels_fixture.h"

namespace ostinato::testing {

// Numbers of rows and depths on both sides of what a table takes at once.
template <typename Table>
std::vector<int64_t> RowCounts(const Table& table) {
  if (table.kernels.release_tiles != nullptr)
    return {0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 65};
  std::vector<int64_t> counts(14);
  std::iota(counts.begin(), counts.end(), 0);
  return counts;
}
template <typename Table>
std::vector<int64_t> Depths(const Table& table) {
  if (table.kernels.release_tiles != nullptr) return {0, 1, 31, 32, 33, 65, 96, 545};
  return {0, 1, 2, 3, 17, 64, 65, 289};
}

struct Shape {
  cpu::PanelShape panel_shape;
  int panel_vectors;
  int row_vectors;
  int target[4];  // of each vector of the panel, in a row of the accumulator
};

inline constexpr Shape kShapes[] = {
    {cpu::PanelShape::k1, 1, 1, {0}},
    {cpu::PanelShape::k2, 2, 2, {0, 1}},
    {cpu::PanelShape::k3, 3, 3, {0, 1, 2}},
    {cpu::PanelShape::k4, 4, 4, {0, 1, 2, 3}},
    {cpu::PanelShape::kGruInput, 3, 4, {0, 1, 2}},
    {cpu::PanelShape::kGruRecurrent, 3, 4, {0, 1, 3}},
};

// One shape and depth: all numbers of rows give the same bits as rows one by one, and
// those are near the sums in double. Rows are at `even` distances, or anywhere.
template <typename Table>
void CheckProduct(const Table& table, const Shape& shape, int64_t depth, bool starts,
                  bool even) {
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  const std::vector<int64_t> counts = RowCounts(table);
  const int64_t kMaxRows = counts.back();
  constexpr int64_t kOffset = 3;
  const auto product = table.kernels.product[static_cast<int>(shape.panel_shape)];
  const int64_t lanes = table.lanes;
  const int64_t width = shape.row_vectors * lanes;
  // Sums that lie together may be read again, for pieces of a deep panel.
  const int64_t stride = depth > 65 ? 4 * lanes : width + 5;
  const int64_t steps = (depth + table.pairs - 1) / table.pairs;
  Random random;

  Rows<Operand> a(kMaxRows, kOffset + depth, even);
  for (Operand* row : a.rows) {
    for (int64_t k = 0; k < depth; ++k) {
      row[kOffset + k] = Make<Operand>(random.Uniform(-1, 1));
    }
  }
  Guarded<Operand> panel(steps * shape.panel_vectors * lanes * table.pairs);
  random.Fill(panel, 1);
  Guarded<Accum> start(width), before(kMaxRows * stride);
  random.Fill(start, 1);
  random.Fill(before, 1);
  const Accum* const start_or_null = starts ? start.data() : nullptr;
  const auto reset = [&](Guarded<Accum>& c) {
    std::copy_n(before.data(), c.size(), c.data());
  };

  Guarded<Accum> singles(kMaxRows * stride);
  reset(singles);
  for (int64_t r = 0; r < kMaxRows; ++r) {
    product(a.pointers.data() + r, kOffset, 1, depth, panel.data(), nullptr,
            start_or_null, singles.data() + r * stride, stride);
  }
  for (const int64_t rows : counts) {
    // The gap after the last row is not there to be written to.
    Guarded<Accum> c(
        std::max<int64_t>(0, (rows - 1) * stride + (rows > 0 ? width : 0)));
    reset(c);
    // What is fetched meanwhile need not be memory of ours.
    product(a.pointers.data(), kOffset, rows, depth, panel.data(),
            panel.data() + panel.size(), start_or_null, c.data(), stride);
    for (int64_t i = 0; i < c.size(); ++i) ExpectExact(c[i], singles[i], "product");
  }

  // Pieces of a panel, in multiples of 32, add up to the same bits.
  for (const int64_t piece : {32, 96}) {
    Guarded<Accum> c(kMaxRows * stride);
    reset(c);
    for (int64_t k = 0; k < depth; k += piece) {
      product(a.pointers.data(), kOffset + k, kMaxRows, std::min(piece, depth - k),
              panel.data() + k * shape.panel_vectors * lanes, nullptr,
              k == 0 ? start_or_null : nullptr, c.data(), stride);
    }
    for (int64_t i = 0; i < c.size() && depth > 0; ++i) {
      ExpectExact(c[i], singles[i], "product in pieces");
    }
  }

  Guarded<Accum> want(kMaxRows * stride), sizes(kMaxRows * stride);
  reset(want);
  reset(sizes);
  const bool from_start = starts && shape.panel_shape != cpu::PanelShape::kGruRecurrent;
  for (int64_t r = 0; r < kMaxRows; ++r) {
    if (from_start) {
      std::copy_n(start.data(), width, want.data() + r * stride);
    }
    for (int64_t v = 0; v < shape.panel_vectors; ++v) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t at = r * stride + shape.target[v] * lanes + lane;
        double sum = want[at];
        double size = std::abs(sum);
        for (int64_t k = 0; k < depth; ++k) {
          const int64_t vector = k / table.pairs * shape.panel_vectors + v;
          const int64_t element =
              (vector * lanes + lane) * table.pairs + k % table.pairs;
          const double term = a.At(r, kOffset + k) * Value(panel[element]);
          sum += term;
          size += std::abs(term);
        }
        want[at] = static_cast<Accum>(sum);
        sizes[at] = static_cast<Accum>(size);
      }
    }
  }
  const double tolerance = static_cast<double>(depth + 2) * kHalfUlp<Accum>;
  for (int64_t i = 0; i < want.size(); ++i) {
    ExpectNear(singles[i], want[i], tolerance * std::abs(sizes[i]), "product");
  }
}

template <typename Table>
void CheckProducts(const Table& table) {
  for (const Shape& shape : kShapes) {
    for (const int64_t depth : Depths(table)) {
      for (const bool even : {false, true}) {
        CheckProduct(table, shape, depth, true, even);
        CheckProduct(table, shape, depth, false, even);
      }
    }
  }
}

template <typename Table>
void CheckPackRows(const Table& table, int64_t lanes, int64_t depth) {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  const int64_t vector = table.lanes * table.pairs;
  const int64_t panel_stride = 2 * vector;
  const int64_t stride = depth + 3;
  const int64_t steps = (depth + table.pairs - 1) / table.pairs;
  Random random;
  Guarded<Storage> src((lanes - 1) * stride + depth);
  random.Fill(src, 1);
  Guarded<Operand> panel(std::max<int64_t>(0, (steps - 1) * panel_stride + vector));
  table.kernels.pack_rows(src.data(), stride, lanes, depth, panel.data(), panel_stride);
  for (int64_t i = 0; i < panel.size(); ++i) {
    const int64_t lane = i % panel_stride / table.pairs;
    const int64_t k = i / panel_stride * table.pairs + i % table.pairs;
    if (lane >= table.lanes) {
      CHECK_EQ(panel.Untouched(i), true);
    } else {
      const bool exists = lane < lanes && k < depth;
      ExpectExact(Value(panel[i]), exists ? Value(src[lane * stride + k]) : 0,
                  "pack_rows");
    }
  }
}

template <typename Table>
void CheckAddRows(const Table& table, int64_t rows, int64_t vectors, int64_t count,
                  bool same) {
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  const int64_t lanes = table.lanes, width = 4 * lanes, first = 2;
  Random random;
  Rows<Operand> a(rows, first + count);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < first + count; ++i) {
      a.rows[r][i] = Make<Operand>(random.Uniform(-1, 1));
    }
  }
  Guarded<Accum> start(width), c(std::max<int64_t>(0, rows * (width + 1) - 1));
  random.Fill(start, 1);
  table.kernels.add_rows(a.pointers.data(), first, same ? 0 : lanes, count, rows,
                         vectors, start.data(), c.data(), width + 1);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < width; ++i) {
      const int64_t at = same ? i % lanes : i;
      const bool adds = i / lanes < vectors && at < count;
      const Accum value = adds ? static_cast<Accum>(a.At(r, first + at)) : Accum{0};
      ExpectExact(c[r * (width + 1) + i], start[i] + value, "add_rows");
    }
  }
}

template <typename Table>
void CheckAddScaledRows(const Table& table, int64_t rows, int64_t vectors,
                        int64_t count, bool same, bool gru) {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  const int64_t lanes = table.lanes, width = 4 * lanes, first = 2;
  const int64_t step = same ? 0 : lanes, stride = same ? count + 1 : lanes;
  Random random;
  Rows<Operand> a(rows, first + count);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < first + count; ++i) {
      a.rows[r][i] = Make<Operand>(random.Uniform(-1, 1));
    }
  }
  Guarded<Storage> w((vectors - 1) * stride + count - (vectors - 1) * step);
  random.Fill(w, 1);
  Guarded<Accum> c(std::max<int64_t>(0, rows * (width + 1) - 1));
  random.Fill(c, 1);
  const std::vector<Accum> before(c.data(), c.data() + c.size());
  table.kernels.add_scaled_rows(a.pointers.data(), first, step, count, rows, vectors,
                                gru, w.data(), stride, c.data(), width + 1);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < width; ++i) {
      const int64_t slot = i / lanes, lane = i % lanes, at = r * (width + 1) + i;
      const int64_t v = gru && slot == 3 ? 2 : slot;
      const bool adds = v < vectors && v * step + lane < count && !(gru && slot == 2);
      const double product =
          adds ? a.At(r, first + v * step + lane) * Value(w[v * stride + lane]) : 0;
      ExpectNear(c[at], before[at] + product, adds ? 4 * kHalfUlp<Accum> : 0,
                 "add_scaled_rows");
    }
  }
}

template <typename Table>
void CheckPackColumns(const Table& table, int64_t columns, int64_t depth) {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  constexpr int64_t kOffset = 5;
  const int64_t width = (columns + table.lanes - 1) / table.lanes * table.lanes;
  const int64_t pairs = table.pairs;
  Random random;
  Rows<Storage> rows(depth, kOffset + columns);
  for (auto& row : rows.arrays) random.Fill(*row, 1);
  Guarded<Operand> panel((depth + pairs - 1) / pairs * pairs * width);
  table.kernels.pack_columns(rows.pointers.data(), kOffset, depth, columns,
                             panel.data());
  for (int64_t i = 0; i < panel.size(); ++i) {
    const int64_t k = i / (width * pairs) * pairs + i % pairs;
    const int64_t n = i / pairs % width;
    const bool exists = n < columns && k < depth;
    ExpectExact(Value(panel[i]), exists ? rows.At(k, kOffset + n) : 0, "pack_columns");
  }
}

template <typename Table>
void CheckTranspose(const Table& table, int64_t rows, int64_t columns) {
  using Operand = typename Table::Operand;
  const int64_t stride = columns + 1;
  const int64_t dst_stride = rows + 2;
  Random random;
  Guarded<Operand> src((rows - 1) * stride + columns);
  random.Fill(src, 1);
  Guarded<Operand> dst((columns - 1) * dst_stride + rows);
  table.kernels.transpose(src.data(), stride, rows, columns, dst.data(), dst_stride);
  for (int64_t i = 0; i < dst.size(); ++i) {
    if (i % dst_stride >= rows) {
      CHECK_EQ(dst.Untouched(i), true);
    } else {
      ExpectExact(Value(dst[i]), Value(src[i % dst_stride * stride + i / dst_stride]),
                  "transpose");
    }
  }
}

template <typename Table>
void CheckDot(const Table& table, int64_t lanes, int64_t depth) {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  const int64_t stride = depth + 1;
  Random random;
  Guarded<Storage> w((lanes - 1) * stride + depth);
  Guarded<Operand> a(depth);
  Guarded<Accum> out(lanes), before(lanes);
  random.Fill(w, 1);
  random.Fill(a, 1);
  random.Fill(before, 1);
  std::copy_n(before.data(), lanes, out.data());
  table.kernels.dot(w.data(), stride, lanes, depth, a.data(), out.data());
  for (int64_t n = 0; n < lanes; ++n) {
    double want = before[n];
    double size = std::abs(want);
    for (int64_t k = 0; k < depth; ++k) {
      const double term = Value(w[n * stride + k]) * Value(a[k]);
      want += term;
      size += std::abs(term);
    }
    const auto terms = static_cast<double>(depth + 2);
    ExpectNear(out[n], want, terms * kHalfUlp<Accum> * size, "dot");
  }
}

template <typename Table>
void CheckMoves(const Table& table) {
  const int64_t lanes = table.lanes;
  for (int64_t n = 1; n <= lanes; ++n) {
    for (const int64_t depth : {int64_t{0}, int64_t{1}, int64_t{2}, lanes - 1, lanes,
                                lanes + 1, 2 * lanes, int64_t{65}, int64_t{131}}) {
      CheckPackRows(table, n, depth);
      CheckDot(table, n, depth);
    }
  }
  for (const int64_t columns :
       {int64_t{1}, lanes - 1, lanes, lanes + 1, 3 * lanes, 4 * lanes - 3, 4 * lanes}) {
    for (const int64_t depth : {0, 1, 5}) CheckPackColumns(table, columns, depth);
  }
  for (const int64_t rows : {0, 1, 3}) {
    for (const int64_t gates : {3, 4}) {
      CheckAddRows(table, rows, gates, lanes, true);
      CheckAddRows(table, rows, gates, 1, true);
    }
    CheckAddScaledRows(table, rows, 3, lanes, true, true);
    CheckAddScaledRows(table, rows, 4, lanes - 1, true, false);
    CheckAddScaledRows(table, rows, 4, 4 * lanes, false, false);
    CheckAddScaledRows(table, rows, 2, lanes + 1, false, false);
    CheckAddRows(table, rows, 4, 4 * lanes, false);
    CheckAddRows(table, rows, 2, lanes + 1, false);
  }
  const int64_t sizes[] = {1, 2, lanes - 1, lanes, lanes + 1, 2 * lanes + 3};
  for (const int64_t rows : sizes) {
    for (const int64_t columns : sizes) CheckTranspose(table, rows, columns);
  }
}

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_KERNELS_PRODUCTS_H_
