#include "cpu/network/heads.h"

#include <vector>

namespace ostinato::cpu {
namespace {

// Copies those of the columns first .. first + width - 1 that row `row` has, and zeros
// for the others.
template <typename Storage>
void CopyRow(const HeadMatrix<Storage>& matrix, int64_t row, int64_t first,
             int64_t width, Storage* to) {
  const int64_t size = matrix.columns.head;
  const int64_t own = row % matrix.rows.size / matrix.rows.head * size;
  const int64_t begin = std::clamp(own, first, first + width);
  const int64_t end = std::clamp(own + size, begin, first + width);
  std::fill(to, to + width, Storage{});
  const Storage* from = matrix.data + row * size;
  std::copy(from + (begin - own), from + (end - own), to + (begin - first));
}

}  // namespace

Heads::Heads(const Network& network, int64_t lanes) {
  const int64_t heads = network.num_heads;
  units.size = network.hidden_size;
  outputs.size = network.output_size();
  units.head = units.size / heads;
  outputs.head = outputs.size / heads;
  const int64_t each = std::min(heads, CeilDiv(lanes, units.head));
  groups = CeilDiv(heads, each);
  units.group = each * units.head;
  outputs.group = each * outputs.head;
}

template <typename Storage, typename Operand, typename Accum>
void PackHeadRows(const Kernels<Storage, Operand, Accum>& kernels,
                  const HeadMatrix<Storage>& matrix, int64_t row, int64_t lanes,
                  Operand* panel, int64_t panel_stride) {
  const HeadParts& columns = matrix.columns;
  if (columns.head == columns.group) {
    kernels.pack_rows(matrix.data + row * columns.head, columns.head, lanes,
                      columns.head, panel, panel_stride);
    return;
  }
  const int64_t group = matrix.GroupOf(row), depth = columns.count(group);
  std::vector<Storage> wide(lanes * depth);
  for (int64_t n = 0; n < lanes; ++n) {
    CopyRow(matrix, row + n, columns.first(group), depth, wide.data() + n * depth);
  }
  kernels.pack_rows(wide.data(), depth, lanes, depth, panel, panel_stride);
}

template <typename Storage, typename Operand, typename Accum>
void PackHeadColumns(const Kernels<Storage, Operand, Accum>& kernels,
                     const HeadMatrix<Storage>& matrix, int64_t row, int64_t count,
                     int64_t first, int64_t width, Operand* panel) {
  std::vector<const Storage*> rows(count);
  const HeadParts& columns = matrix.columns;
  if (columns.head == columns.group) {
    for (int64_t k = 0; k < count; ++k) {
      rows[k] = matrix.data + (row + k) * columns.head;
    }
    kernels.pack_columns(rows.data(), first % columns.head, count, width, panel);
    return;
  }
  std::vector<Storage> wide(count * width);
  for (int64_t k = 0; k < count; ++k) {
    CopyRow(matrix, row + k, first, width, wide.data() + k * width);
    rows[k] = wide.data() + k * width;
  }
  kernels.pack_columns(rows.data(), 0, count, width, panel);
}

#define OSTINATO_HEADS(Storage, Operand, Accum)                                        \
  template void PackHeadRows(const Kernels<Storage, Operand, Accum>&,                  \
                             const HeadMatrix<Storage>&, int64_t, int64_t, Operand*,   \
                             int64_t);                                                 \
  template void PackHeadColumns(const Kernels<Storage, Operand, Accum>&,               \
                                const HeadMatrix<Storage>&, int64_t, int64_t, int64_t, \
                                int64_t, Operand*);
OSTINATO_HEADS(float, float, float)
OSTINATO_HEADS(double, double, double)
OSTINATO_HEADS(BFloat16, float, float)
OSTINATO_HEADS(BFloat16, BFloat16, float)
#undef OSTINATO_HEADS

}  // namespace ostinato::cpu
