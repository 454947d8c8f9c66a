// The handlers that gather matrices of weights into the flat vector, and back.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/network/matrices.h"
#include "cpu/runtime/team.h"
#include "ffi/handler.h"

namespace ostinato::ffi {
namespace {

namespace xffi = ::xla::ffi;

using Numbers = xffi::Span<const int64_t>;

// One array of a call; its first axis counts members of an ensemble if there is one.
struct Array {
  explicit Array(const xffi::AnyBuffer& buffer)
      : data(static_cast<char*>(buffer.untyped_data())),
        bytes(static_cast<int64_t>(buffer.size_bytes())),
        element(static_cast<int64_t>(xffi::ByteWidth(buffer.element_type()))),
        first_axis(buffer.dimensions().size() == 0 ? 1 : buffer.dimensions()[0]) {}

  char* data;
  int64_t bytes, element, first_axis;
};

// The order of the numbers of a block in the attribute `blocks`, see joining.py.
struct Numbered {
  int64_t matrix, first, stride, rows, columns, at, by_column;
};
constexpr int64_t kNumbers = sizeof(Numbered) / sizeof(int64_t);

bool IsNegative(const Numbered& b) {
  return std::min({b.matrix, b.first, b.stride, b.rows, b.columns, b.at}) < 0;
}

// One past the last element that a block touches in its matrix.
int64_t EndOf(const Numbered& b) {
  if (b.rows == 0 || b.columns == 0) return 0;
  return b.first +
         (b.by_column != 0 ? (b.columns - 1) * b.stride + b.rows : b.rows * b.columns);
}

void Run(cpu::Direction direction, Numbers numbers, bool ensemble,
         const std::vector<Array>& matrices, const Array& vector) {
  if (vector.bytes == 0) return;
  const int64_t members = ensemble ? vector.first_axis : 1;
  const int64_t size = vector.bytes / vector.element / members;
  if (numbers.size() % kNumbers != 0) throw std::invalid_argument("`blocks` is cut");
  const auto* given = reinterpret_cast<const Numbered*>(numbers.begin());
  std::vector<cpu::RowBlock> blocks(numbers.size() / kNumbers);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Numbered& b = given[i];
    if (IsNegative(b)) throw std::invalid_argument("`blocks` has a negative number");
    const Array& matrix = matrices.at(b.matrix);
    if (matrix.element != vector.element ||
        EndOf(b) > matrix.bytes / matrix.element / members ||
        b.at + b.rows * b.columns > size) {
      throw std::invalid_argument("block " + std::to_string(i) +
                                  " does not fit its arrays");
    }
    blocks[i] = {b.rows,           b.columns, b.at,
                 b.by_column != 0, b.stride,  matrix.data + b.first * matrix.element};
  }
  cpu::Team team(cpu::ThreadsForCopies(size));
  for (int64_t member = 0; member < members; ++member) {
    cpu::CopyRows(direction, blocks, vector.element,
                  vector.data + member * size * vector.element, team);
    for (size_t i = 0; i < blocks.size(); ++i) {
      blocks[i].matrix += matrices[given[i].matrix].bytes / members;
    }
  }
}

xffi::Error Join(Numbers blocks, bool ensemble, xffi::RemainingArgs arguments,
                 xffi::Result<xffi::AnyBuffer> vector) {
  std::vector<Array> matrices;
  for (size_t i = 0; i < arguments.size(); ++i) {
    matrices.emplace_back(arguments.get<xffi::AnyBuffer>(i).value());
  }
  Run(cpu::Direction::kJoin, blocks, ensemble, matrices, Array(*vector));
  return xffi::Error::Success();
}

xffi::Error Split(Numbers blocks, bool ensemble, xffi::AnyBuffer vector,
                  xffi::RemainingRets results) {
  std::vector<Array> matrices;
  for (size_t i = 0; i < results.size(); ++i) {
    matrices.emplace_back(*results.get<xffi::AnyBuffer>(i).value());
  }
  Run(cpu::Direction::kSplit, blocks, ensemble, matrices, Array(vector));
  return xffi::Error::Success();
}

auto Attributes() {
  return xffi::Ffi::Bind().Attr<Numbers>("blocks").Attr<bool>("ensemble");
}

}  // namespace
}  // namespace ostinato::ffi

OSTINATO_FFI_HANDLER(
    ostinato_join, ostinato::ffi::Join,
    ostinato::ffi::Attributes().RemainingArgs().Ret<ostinato::ffi::xffi::AnyBuffer>());
OSTINATO_FFI_HANDLER(
    ostinato_split, ostinato::ffi::Split,
    ostinato::ffi::Attributes().Arg<ostinato::ffi::xffi::AnyBuffer>().RemainingRets());
