#include "cpu/network/matrices.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "cpu/kernels/dispatch.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 16;
// Rows of a task, multiples of a line of a cache: long runs in the matrix are fastest.
constexpr int64_t kFewestRows = 64, kMostRows = 512;

// dst[k * dst_stride + n] = src[n * stride + k] for n < rows, k < columns.
template <typename T>
void Transpose(const T* src, int64_t stride, int64_t rows, int64_t columns, T* dst,
               int64_t dst_stride) {
  if constexpr (sizeof(T) == 4) {
    CurrentKernels().f32->transpose(src, stride, rows, columns, dst, dst_stride);
  } else if constexpr (sizeof(T) == 8) {
    CurrentKernels().f64->transpose(src, stride, rows, columns, dst, dst_stride);
  } else {
    constexpr int64_t kBlock = 64 / sizeof(T);  // one line of a cache
    for (int64_t n = 0; n < rows; n += kBlock) {
      const int64_t height = std::min(rows - n, kBlock);
      for (int64_t k = 0; k < columns; ++k) {
        for (int64_t i = 0; i < height; ++i) {
          dst[k * dst_stride + n + i] = src[(n + i) * stride + k];
        }
      }
    }
  }
}

template <typename T>
void Copy(Direction direction, const RowBlock& block, int64_t first, int64_t rows,
          T* vector) {
  const bool join = direction == Direction::kJoin;
  const int64_t columns = block.columns;
  T* const part = vector + block.at + first * columns;
  T* const matrix = reinterpret_cast<T*>(block.matrix);
  if (!block.by_column) {
    T* const same = matrix + first * columns;
    std::memcpy(join ? part : same, join ? same : part, rows * columns * sizeof(T));
  } else if (join) {
    Transpose(matrix + first, block.stride, columns, rows, part, columns);
  } else {
    Transpose(part, columns, rows, columns, matrix + first, block.stride);
  }
}

struct Task {
  const RowBlock* block;
  int64_t first, rows;
};

// Some tasks for each thread.
std::vector<Task> TasksOf(const std::vector<RowBlock>& blocks, int32_t threads) {
  int64_t elements = 0;
  for (const RowBlock& block : blocks) elements += block.rows * block.columns;
  std::vector<Task> tasks;
  for (const RowBlock& block : blocks) {
    if (block.columns == 0) continue;
    const int64_t rows = elements / (2 * threads) / block.columns;
    const int64_t step = std::clamp(rows / 64 * 64, kFewestRows, kMostRows);
    for (int64_t row = 0; row < block.rows; row += step) {
      tasks.push_back({&block, row, std::min(step, block.rows - row)});
    }
  }
  return tasks;
}

template <typename T>
void CopyAll(Direction direction, const std::vector<RowBlock>& blocks, char* vector,
             Team& team) {
  const std::vector<Task> tasks = TasksOf(blocks, team.threads());
  team.ForEach(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const Task& task = tasks[i];
    Copy(direction, *task.block, task.first, task.rows, reinterpret_cast<T*>(vector));
  });
}

}  // namespace

void CopyRows(Direction direction, const std::vector<RowBlock>& blocks, int64_t element,
              char* vector, Team& team) {
  switch (element) {
    case 2:
      return CopyAll<uint16_t>(direction, blocks, vector, team);
    case 4:
      return CopyAll<float>(direction, blocks, vector, team);
    case 8:
      return CopyAll<double>(direction, blocks, vector, team);
    default:
      throw std::invalid_argument("elements must have 2, 4 or 8 bytes");
  }
}

int32_t ThreadsForCopies(int64_t elements) {
  return static_cast<int32_t>(
      std::min<int64_t>(1 + elements / kElementsPerThread, kMostThreads));
}

}  // namespace ostinato::cpu
