// The heads of a network, and its matrices that are block-diagonal by head.
//
// Products take heads in groups: a head whose units fill a vector is a group by itself;
// smaller ones are multiplied several at a time, with zeros between them, because their
// lanes would be idle otherwise. A network with one head has one group.
#ifndef OSTINATO_CPU_NETWORK_HEADS_H_
#define OSTINATO_CPU_NETWORK_HEADS_H_

#include <algorithm>
#include <cstdint>

#include "cpu/kernels/kernels.h"
#include "cpu/network/network.h"

namespace ostinato::cpu {

// The units of a layer, or its outputs, divided among heads and groups.
struct HeadParts {
  int64_t size;   // of all heads
  int64_t head;   // of one head
  int64_t group;  // of a group; the last group may have fewer

  int64_t first(int64_t g) const { return g * group; }
  int64_t count(int64_t g) const { return std::min(group, size - first(g)); }
};

struct Heads {
  Heads(const Network& network, int64_t lanes);

  int64_t groups;
  HeadParts units, outputs;
};

// A matrix with `blocks` blocks of rows.size rows (those of a gate), in which row r
// belongs to head r / rows.head. Stored are the columns of that head alone.
template <typename Storage>
struct HeadMatrix {
  const Storage* data;
  int64_t blocks;
  HeadParts rows, columns;

  int64_t GroupOf(int64_t row) const { return row % rows.size / rows.group; }
};

// Kernels::pack_rows of `lanes` rows of one group, with all columns of the group.
template <typename Storage, typename Operand, typename Accum>
void PackHeadRows(const Kernels<Storage, Operand, Accum>& kernels,
                  const HeadMatrix<Storage>& matrix, int64_t row, int64_t lanes,
                  Operand* panel, int64_t panel_stride);

// Kernels::pack_columns of columns first .. first + width - 1 of `count` rows, all of
// one group.
template <typename Storage, typename Operand, typename Accum>
void PackHeadColumns(const Kernels<Storage, Operand, Accum>& kernels,
                     const HeadMatrix<Storage>& matrix, int64_t row, int64_t count,
                     int64_t first, int64_t width, Operand* panel);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_HEADS_H_
