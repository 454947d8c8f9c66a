// The threads of one call: the calling thread and whichever helpers show up.
//
// Helpers are threads of the process-wide pool. The calling thread works itself and
// waits only for helpers that have begun; one that is asleep, busy with another call
// or held up by the system is left out. So calls cannot deadlock, whoever calls.
#ifndef OSTINATO_CPU_RUNTIME_TEAM_H_
#define OSTINATO_CPU_RUNTIME_TEAM_H_

#include <cstdint>

namespace ostinato::cpu {

class Pool;
struct Seat;

// How many threads a call may use, process-wide, the calling one included; out of
// bounds means the nearest bound. Until it is set: UsableCpus(). Calls that have begun
// keep what they have.
void SetNumThreads(int32_t threads) noexcept;
int32_t NumThreads();

class Member {
 public:
  int32_t index() const { return index_; }  // 0 is the calling thread
  int32_t size() const { return size_; }

  // Returns when every member has called it as often as this one, or has left the
  // body; what they wrote before is then visible.
  void Sync() {
    if (size_ > 1) Meet(false);
  }

  // Sync, and whether to go on: false, for every member alike, once some of them have
  // been stopped by the system so long that the others had better not wait again. What
  // the body then leaves undone is for the next Run.
  bool SyncAndGoOn() { return size_ == 1 || Meet(true); }

 private:
  friend class Pool;
  friend class Team;

  Member() = default;
  Member(Seat* seats, int32_t index, int32_t size, int64_t base)
      : seats_(seats), index_(index), size_(size), base_(base), round_(base) {}

  bool Meet(bool may_end);

  Seat* seats_ = nullptr;
  int32_t index_ = 0;
  int32_t size_ = 1;
  int64_t base_ = 0;   // where this Run began to count rounds
  int64_t round_ = 0;  // goes up by one with every Sync
  int64_t lost_ = 0;   // ns of waiting for stopped threads
};

class Team {
 public:
  // Takes the pool if it is free and wakes helpers, else works alone; `most` caps the
  // number of threads, so Team(1) costs nothing.
  explicit Team(int32_t most);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Threads there may be at most: for choosing how to cut the work, never what is
  // computed.
  int32_t threads() const { return threads_; }

  // body(Member&) on every thread that is here now; returns when all have returned.
  // Members may use Sync, so nobody joins later: a Run should not be the whole of a
  // long call. If waiting for one another took too much of the time, Runs have one
  // member for a while.
  //
  // If bodies throw, the first exception is thrown again here when all have ended. A
  // member that has thrown holds up no Sync: the others go on, on whatever it left.
  template <typename Body>
  void Run(const Body& body) {
    RunBody(
        [](const void* b, Member& member) { (*static_cast<const Body*>(b))(member); },
        &body);
  }

  // body(i) for every i < n, once each, on any thread; helpers may join at any time.
  // The calling thread waits for items that others have begun, not for others. If
  // bodies throw, some items may be left out, and the first exception is thrown again
  // when no item is in progress.
  template <typename Body>
  void ForEach(int64_t n, const Body& body) {
    RunItems(
        n, [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); }, &body);
  }

 private:
  using BodyCall = void (*)(const void* body, Member& member);
  using ItemCall = void (*)(const void* body, int64_t item);
  friend class Pool;

  void RunBody(BodyCall call, const void* body);
  void RunItems(int64_t n, ItemCall call, const void* body);

  Pool* pool_ = nullptr;  // null: alone
  int32_t threads_ = 1;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_TEAM_H_
