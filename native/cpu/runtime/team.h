// The threads of one call: the calling thread and whichever helpers show up.
//
// Helpers are threads of the process-wide pool. The calling thread works itself and
// waits only for helpers that have begun; one that is asleep, busy with another call
// or held up by the system is left out. So calls cannot deadlock, whoever calls.
#ifndef OSTINATO_CPU_RUNTIME_TEAM_H_
#define OSTINATO_CPU_RUNTIME_TEAM_H_

#include <cstdint>

#include "cpu/runtime/pool.h"

namespace ostinato::cpu {

// How many threads a call may use, process-wide, the calling one included; out of
// bounds means the nearest bound. Until it is set: UsableCpus(). Calls that have begun
// keep what they have.
void SetNumThreads(int32_t threads) noexcept;
int32_t NumThreads();

class Team {
 public:
  // Takes the pool if it is free and wakes helpers, else works alone. `most` is how
  // many threads the work would keep busy: it caps their number, so Team(1) costs
  // nothing, and the more work there is, the longer Runs wait for helpers that were
  // asleep.
  explicit Team(int32_t most);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // How many threads there may be at most. This may decide how work is divided, never
  // what is computed.
  int32_t threads() const { return threads_; }

  // Returns how long it takes until every thread has come to a Sync and read some lines
  // of memory that the others have written: 100 ns where the cores share a cache, up to
  // a microsecond between the far ends of a machine. Measured now and then.
  int64_t ExchangeNs();

  // Calls body(Worker&) on every thread that is here now; returns when all have
  // returned. Workers may use Sync, so nobody joins later: a Run should not be the
  // whole of a long call.
  //
  // If bodies throw, the first exception is thrown again here when all have ended. A
  // worker that has thrown holds up no Sync: the others continue with what it left.
  template <typename Body>
  void Run(const Body& body) {
    RunBody(
        [](const void* b, Worker& worker) { (*static_cast<const Body*>(b))(worker); },
        &body);
  }

  // Calls body(i) for every i < n, once each, on any thread; helpers may join at any
  // time. The calling thread waits for items that others have begun, not for other
  // threads. If bodies throw, some items may be left out, and the first exception is
  // thrown again when no item is in progress.
  template <typename Body>
  void ForEach(int64_t n, const Body& body) {
    RunItems(
        n, [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); }, &body);
  }

 private:
  void RunBody(Pool::BodyCall call, const void* body);
  void RunItems(int64_t n, Pool::ItemCall call, const void* body);

  Pool* pool_ = nullptr;  // null: alone
  int32_t threads_ = 1;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_TEAM_H_
