// Matrices that other libraries store by column, and the flat vector that the operator
// reads.
#ifndef OSTINATO_CPU_NETWORK_MATRICES_H_
#define OSTINATO_CPU_NETWORK_MATRICES_H_

#include <cstdint>
#include <vector>

#include "cpu/runtime/team.h"

namespace ostinato::cpu {

// Rows of a matrix that follow each other in the vector, where they lie row by row.
struct RowBlock {
  int64_t rows, columns;
  int64_t at;      // of its first element, in the vector
  bool by_column;  // how the elements lie in `matrix`
  int64_t stride;  // from one column to the next if by_column
  char* matrix;    // where the first element of the block is
};

// Copies every block from its matrix into the vector, or the other way; elements of 2,
// 4 or 8 bytes. Throws std::invalid_argument for another size.
enum class Direction { kJoin, kSplit };
void CopyRows(Direction direction, const std::vector<RowBlock>& blocks, int64_t element,
              char* vector, Team& team);

// How many threads pay for so many elements.
int32_t ThreadsForCopies(int64_t elements);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_MATRICES_H_
