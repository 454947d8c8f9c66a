#include "cpu/runtime/team.h"

#include <algorithm>
#include <atomic>

#include "cpu/runtime/exchange.h"
#include "cpu/runtime/features.h"
#include "cpu/runtime/per_process.h"

namespace ostinato::cpu {
namespace {

std::atomic<int32_t> num_threads{0};  // 0: not known yet

// How long the least work takes, in ns, for which one more thread is worth waking; and
// how long waking takes at most if the machine is not busy.
constexpr int64_t kWorthWakingNs = 3'000, kMostPatienceNs = 100'000;

}  // namespace

void SetNumThreads(int32_t threads) noexcept {
  num_threads.store(std::clamp(threads, int32_t{1}, kMostThreads));
}

int32_t NumThreads() {
  if (num_threads.load() == 0) {
    int32_t unset = 0;  // one that another thread has set meanwhile stays
    num_threads.compare_exchange_strong(unset, std::min(UsableCpus(), kMostThreads));
  }
  return num_threads.load();
}

Team::Team(int32_t most) {
  const int32_t threads = most > 1 ? std::min(most, NumThreads()) : 1;
  if (threads == 1) return;
  Pool& pool = PerProcess<Pool>::Get();
  if (!pool.TryOwn()) return;
  pool_ = &pool;
  const int64_t patience = std::min((most - 1) * kWorthWakingNs, kMostPatienceNs);
  threads_ = 1 + pool.Open(threads - 1, patience);
}

Team::~Team() {
  if (pool_ != nullptr) pool_->Disown();
}

int64_t Team::ExchangeNs() {
  if (pool_ == nullptr) return 0;
  if (const int64_t known = pool_->KnownExchangeNs()) return known;
  const int64_t measured = MeasureExchange(*this);
  if (measured > 0) pool_->KeepExchangeNs(measured);
  return measured;
}

void Team::RunBody(Pool::BodyCall call, const void* body) {
  if (pool_ == nullptr) {
    Worker alone;
    call(body, alone);
  } else {
    pool_->Run(call, body);
  }
}

void Team::RunItems(int64_t n, Pool::ItemCall call, const void* body) {
  if (pool_ == nullptr || n <= 1) {
    for (int64_t i = 0; i < n; ++i) call(body, i);
  } else {
    pool_->ForEach(n, call, body);
  }
}

}  // namespace ostinato::cpu
