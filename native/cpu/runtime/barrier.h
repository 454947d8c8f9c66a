// The workers of one Run of a team, and the barrier at which they wait for each other.
#ifndef OSTINATO_CPU_RUNTIME_BARRIER_H_
#define OSTINATO_CPU_RUNTIME_BARRIER_H_

#include <atomic>
#include <cstdint>

namespace ostinato::cpu {

// The state of a worker that the others read. Two cache lines, which some processors
// fetch together.
struct alignas(128) Slot {
  std::atomic<int64_t> round{0};       // the barriers that it has come to
  std::atomic<int64_t> last_round{0};  // of worker 0: where it ends the Run
  std::atomic<int64_t> left{0};        // base of the last Run whose body it has left
};

class Worker {
 public:
  int32_t index() const { return index_; }  // 0 is the calling thread
  int32_t size() const { return size_; }    // of the Run

  // Returns when every worker has called it as often as this one, or has left the
  // body; what they wrote before is then visible.
  void Sync() {
    if (size_ > 1) Barrier(false);
  }

  // Sync, and whether to continue: false, for every worker alike, once some of them
  // have been stopped by the system so long that the others had better not wait again.
  // The next Run does what the body then leaves undone.
  bool SyncAndContinue() { return size_ == 1 || Barrier(true); }

 private:
  friend class Pool;
  friend class Team;

  Worker() = default;
  Worker(Slot* slots, int32_t index, int32_t size, int64_t base)
      : slots_(slots), index_(index), size_(size), base_(base), round_(base) {}

  bool Barrier(bool may_end);

  Slot* slots_ = nullptr;
  int32_t index_ = 0;
  int32_t size_ = 1;
  int64_t base_ = 0;    // where this Run began to count rounds
  int64_t round_ = 0;   // goes up by one with every Sync
  int64_t waited_ = 0;  // ns of waiting for stopped threads
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_BARRIER_H_
