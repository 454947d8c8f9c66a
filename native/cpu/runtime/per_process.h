// One object for the whole process that survives a fork.
#ifndef OSTINATO_CPU_RUNTIME_PER_PROCESS_H_
#define OSTINATO_CPU_RUNTIME_PER_PROCESS_H_

#include <pthread.h>

#include <atomic>

namespace ostinato::cpu {

// The T of this process: made at first use, never destroyed, since threads may use it
// until the process ends. A forked child leaves its parent's alone and makes its own:
// a thread that the child does not have may hold a lock in it.
template <typename T>
class PerProcess {
 public:
  static T& Get() {
    static_cast<void>(registered);  // a static that is not named is not made
    T* object = current.load(std::memory_order_acquire);
    if (object == nullptr) {
      T* const made = new T;
      if (current.compare_exchange_strong(object, made)) {
        object = made;
      } else {
        delete made;  // another thread was first
      }
    }
    return *object;
  }

 private:
  static void Forget() { current.store(nullptr); }

  inline static std::atomic<T*> current{nullptr};
  inline static const int registered = pthread_atfork(nullptr, nullptr, Forget);
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_PER_PROCESS_H_
