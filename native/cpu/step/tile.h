// Some sequences of a loop, which one thread runs for a chunk of steps.
#ifndef OSTINATO_CPU_STEP_TILE_H_
#define OSTINATO_CPU_STEP_TILE_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "cpu/runtime/scratch.h"
#include "cpu/runtime/team.h"
#include "cpu/step/arrays.h"
#include "cpu/step/loop.h"

namespace ostinato::cpu {

// What the tiles of a call share. Sums over sequences are kept apart for groups of them
// that do not depend on the tiles, and added up at the end.
template <typename T>
struct StepLoop {
  const StepCall& call;
  const Kernels<T, T, T>& kernels;
  const StepKernels<T>& step_kernels;
  const KernelsBf16Pairs* pairs;      // null where the processor does not multiply them
  std::vector<const T*> panels = {};  // by weight, see weights.h
  int64_t chunk = 1;                  // steps at a time
  int64_t group = 1;                  // sequences of a group
  // By buffer [group][width], null but for sums: what the steps of some chunks add up
  // to, and what those before do, null where all steps are few. A single chain of
  // additions over all steps would lose digits.
  std::vector<T*> sums = {}, earlier_sums = {};
  std::vector<int64_t> order = {};    // of sequences, see OrderOf
  std::vector<int64_t> lengths = {};  // in that order
  // The first row of each sequence; none unless they lie one after another.
  std::vector<int64_t> offsets = {};

  // The step that runs as number n.
  int64_t StepAt(int64_t n) const { return call.reverse ? call.steps - 1 - n : n; }
};

// Parts of a product that a team shares: a thread that comes late finds one left.
inline int64_t PartsOf(const Team& team) { return int64_t{2} * team.threads(); }

// Elements of a function between two times at which caches are asked for lines.
inline constexpr int64_t kPiece = 128;

// The steps of a sum over groups of so many sequences, which then begins anew.
constexpr int64_t StepsOfASum(int64_t group) { return group < 4 ? 1024 : 4096 / group; }

template <typename T>
class StepTile {
 public:
  // `groups` are the numbers of its groups in rising order; all but the last of the
  // loop have the same number of sequences. The first tile writes what all share.
  StepTile(const StepLoop<T>& loop, std::vector<int64_t> groups, bool first);

  // Runs steps begin .. end - 1, in the order in which they run; at most a chunk. With
  // a team, its threads share the products of the whole chunk, and the columns of large
  // products of a step.
  void Run(int64_t begin, int64_t end, Team* team);
  // The same in parts: what comes before the steps, the steps, what comes after some of
  // them, and writing what is left.
  void Begin(int64_t begin, int64_t end, Team* team);
  void RunSteps(int64_t begin, int64_t end, Team* team);
  void RunAfter(int64_t begin, int64_t end, Team* team);
  void End(int64_t end);
  // Whether there is work for RunAfter or gradients, and one thread may do it while
  // another one runs later steps without a team.
  bool CanFollow() const;
  // Writes the last states, and sums that have a row for every sequence.
  void Finish();

  const std::vector<int64_t>& groups() const { return groups_; }
  // How many of its sequences have a step; these are the first ones.
  int64_t ActiveAt(int64_t n) const;
  // The first row of a buffer at step n of the chunk that ran last.
  const T* Rows(int64_t buffer, int64_t n) const { return Start(buffer, n); }

 private:
  struct Live {
    T* at = nullptr;       // at the current step
    T* other = nullptr;    // kState: what kNext writes, and the next step reads;
                           // the same if the state changes in place
    T* chunk = nullptr;    // what a chunk of steps has; null for an array as it lies
    char* data = nullptr;  // kInput, kOutput: the array, from our first sequence on
  };

  // A buffer that is elsewhere at every step.
  struct Moving {
    size_t buffer;
    int64_t apart;  // elements from a step to the one that runs next
  };
  // Some columns of a product.
  struct Block {
    typename Kernels<T, T, T>::Product product;
    KernelsBf16Pairs::Product pairs;  // of factors in bfloat16, or null
    int64_t column, width;
    const T *panel, *start;  // start: null if the product continues
  };
  // The rows of a product's factor, in bfloat16 where it multiplies pairs.
  struct Factors {
    const T* const* rows;
    const BFloat16* const* halves;
    int64_t count, depth;
  };
  // An instruction with what is the same at every step worked out.
  struct Bound {
    const StepInstruction* instruction;
    StepFunction<T> function;  // null: a product
    StepFunction<T> row_sum;   // if it adds up numbers that lie in a row; else null
    StepRow<T> row;            // if all sequences together are one row; else null
    int count;                 // operands
    bool sums;                 // it adds up sequences, each group by itself
    bool column;               // it reduces rows to one
    bool by_rows;              // each row of the result is that of the operands' rows
    bool even;                 // rows of all sequences are at equal distances
    T* const* out;
    T* const* from[3];  // those that it does not have are the first one
    int64_t offsets[3];
    int64_t elements;               // of a sequence, of `row`
    int64_t apart[3], out_apart;    // from a sequence to the next one, between passes
    bool in_pieces;                 // `row` takes so long that caches have idle time
    size_t first_block, end_block;  // of a product
  };
  // Instructions begin .. end - 1 of a phase: one product, or others that run in passes
  // of so many rows that what they write stays in the first-level cache.
  struct Stretch {
    size_t begin, end;
    int64_t rows;
  };
  struct Program {
    std::vector<Bound> instructions;
    std::vector<Stretch> stretches;
  };

  // tile_bind.cc
  Program Bind(Phase phase);
  Bound BindOne(const StepInstruction& instruction);
  StepFunction<T> RowSumOf(const Bound& bound) const;
  void BindRow(Bound& bound);
  // Whether an operand is read from `Repeated` copies of it, one for each sequence.
  bool Repeats(const StepInstruction& instruction, const StepView& view) const;
  T* const* Repeated(const StepView& view, int64_t width);
  void BindBlocks(Bound& bound);
  void PlaceTemporaries(Program& program);
  int64_t CountFetchTimes(const Program& program) const;

  void Locate(int64_t buffer);
  T* Start(int64_t buffer, int64_t n) const;
  void ReadInputs(int64_t begin, int64_t end);
  // Begins sums anew.
  void PutSumsAside();
  void WriteShared(int64_t buffer, int64_t end);
  void Enter(int64_t n);
  void Advance();
  void Swap();
  void LookAhead(int64_t n, int64_t active);
  // Of its sequences, those that have step n of the chunk.
  int64_t ActiveInChunk(int64_t n) const { return RowsBefore(n + 1) - RowsBefore(n); }

  // tile_steps.cc
  void FetchSome();
  void RunStretch(const Program& program, const Stretch& stretch, int64_t active,
                  Team* team);
  void Execute(const Bound& bound, int64_t first, int64_t rows);
  void ExecuteRow(const Bound& bound, int64_t first, int64_t rows);
  void SumGroups(const Bound& bound, int64_t first, int64_t rows);
  void Multiply(const Bound& bound, int64_t active, Team* team);
  // Whether a product of so many rows is worth the threads of a team.
  bool WorthSharing(const Bound& bound, int64_t rows) const;
  bool MultipliesPairs(const Bound& bound) const {
    return bound.end_block > bound.first_block && blocks_[bound.first_block].pairs;
  }
  // Rounds rows to bfloat16, one after another from `values` on.
  void NarrowRows(const Factors& from, BFloat16* values, const BFloat16** rows) const;
  // `next`: the panel of the block after this one, or null.
  void MultiplyBlock(const Block& block, const Factors& factors, const T* next, T* to,
                     int64_t stride) const;

  // tile_chunk.cc: many steps of a chunk, in tasks that may run in any order and
  // together. A task of a product is some rows, and the blocks of columns first ..
  // last - 1.
  struct Range {
    int64_t begin, end;
  };
  void RunChunk(const Program& program, Range steps, Team* team);
  void ExecuteChunk(const Program& program, const Stretch& stretch, Range steps,
                    Team* team) const;
  void ExecuteSteps(const Bound& bound, int64_t n, int64_t steps) const;
  void MultiplyChunk(const Bound& bound, Range steps, Team* team) const;
  void MultiplyRows(const Bound& bound, Range steps, int64_t task, size_t first,
                    size_t last) const;

  // The rows in an array of our sequences begin .. end - 1, or the one that all share,
  // at step n where the array has steps.
  ArrayRows RowsAt(const StepBuffer& buffer, int64_t n, int64_t begin,
                   int64_t end) const;
  int64_t size() const { return rows_.size(); }
  // Rows of the chunk before step n.
  int64_t RowsBefore(int64_t n) const { return first_row_[n - begin_]; }
  // Elements of a buffer that is ours, for one step.
  int64_t Elements(const StepBuffer& buffer) const {
    return buffer.width * (buffer.rows ? size() : 1);
  }

  const StepLoop<T>& loop_;
  const StepProgram& program_;
  const std::vector<int64_t> groups_;
  const bool first_;
  Scratch scratch_;
  std::vector<int64_t> rows_;        // its sequences
  std::vector<int64_t> first_rows_;  // at step 0 of arrays that have steps
  std::vector<int64_t> lengths_;     // of its sequences
  std::vector<Live> live_;           // by buffer
  std::vector<Moving> moving_;
  std::vector<size_t> next_;  // those of states after a step
  std::vector<Block> blocks_;
  // A short row that all sequences share, once for each of them.
  struct Repetition {
    int64_t buffer, offset, width;
    T* rows;
  };
  std::deque<Repetition> repetitions_;  // instructions point to `rows`
  Program ahead_, steps_, after_;       // by phase
  // What the next step reads and writes in arrays, which caches fetch while a step
  // runs: how often a step has time for that, and how many lines then.
  struct Fetch {
    const char *at, *end;
  };
  std::vector<Fetch> fetches_;
  size_t next_fetch_ = 0;
  int64_t fetch_times_ = 1, fetched_together_ = 0;
  std::vector<const T*> factors_;  // of a product
  std::vector<const BFloat16*> half_factors_;
  BFloat16* halves_ = nullptr;      // the values of these
  bool back_ = false;               // at every other step
  int64_t begin_ = 0;               // of the chunk
  int64_t summed_ = 0;              // steps in the sums
  std::vector<int64_t> first_row_;  // of its steps, among all rows of the chunk
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_TILE_H_
