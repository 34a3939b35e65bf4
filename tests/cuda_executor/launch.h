// The state of the one launch that is running: what the scheduler, the checker and the watchdog share.
#pragma once
#include <ctime>
#include <string>
#include <vector>

#include "context.h"
#include "executor.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

// The kernels' static shared memory is all of this library's .bss; our own globals stay out of it.
#define EXECUTOR_GLOBAL __attribute__((section(".data")))
extern "C" {
extern char __bss_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
extern char __ehdr_start[] __attribute__((visibility("hidden")));
}

namespace executor {

inline constexpr size_t STACK_SIZE = 64 * 1024, PAGE = 4096;
inline constexpr unsigned MAX_THREADS = 1024;

enum class Schedule { forward, reverse, random_threads, random_warps };
enum class State : unsigned char { ready, at_barrier, in_warp, done };
enum class Kind { written, read_only, shared };

struct Fiber {
  uint3 index;
  unsigned number, lane, warp;  // the number is that of the thread in its block
  char* stack;
  Context context;
  State state;
  int line;              // where it waits
  int verdict;           // what its last barrier reduced to
  unsigned warp_epoch;   // the warp barriers that it has passed
};

// Lanes of a warp that meet in a collective. The next one may begin before all have read the values of the last.
struct Meeting {
  unsigned arrived, mask, generation;
  int line;
  uint64_t values[2][32];
};

struct Barrier {
  unsigned waiting;
  int line, value;
  Reduction reduction;
};

// An access to one byte. Thread and block are counted from 1, so that 0 is none.
struct Access {
  uint32_t thread = 0, block = 0, epoch = 0;
  uint16_t warp_epoch = 0;
  bool atomic = false;
};

enum class Readers : unsigned char { one, of_a_block, of_many_blocks };

struct Cell {
  Access write, read;
  Readers readers = Readers::one;
};

struct Region {
  uintptr_t begin, end;
  Kind kind;
  std::string name;
  std::vector<Cell> cells;
};

struct Launch {
  void (*kernel)(void**);
  void** arguments;
  uint3 block_index;
  dim3 grid, block;
  unsigned thread_count, block_number;
  unsigned char* dynamic_shared;
  std::vector<Fiber> fibers;
  std::vector<Meeting> meetings;  // 32 a warp, one for each lane that may be the lowest of a mask
  std::vector<unsigned> order;
  Context scheduler;
  Barrier barrier;
  unsigned alive, epoch;  // the epoch counts barriers, over all blocks
  Schedule schedule;
  uint64_t random;
  std::vector<Region> regions;
  uint64_t* accesses;  // of written buffers, by the binary logarithm of their size
  bool failed;
  char message[1024];
};

extern Launch* launch;
extern Fiber* current;  // the thread that runs; null while the scheduler does

// Where a checked access happened; module.py looks the offset up in the debug information.
struct Place {
  void* address;
  unsigned long offset() const { return (unsigned long)((uintptr_t)address - (uintptr_t)__ehdr_start); }
};

void check_access(uintptr_t address, size_t size, bool write, bool atomic, Place place);
void leave_fiber();

class Watchdog {
 public:
  explicit Watchdog(double cpu_seconds);
  ~Watchdog();

 private:
  timer_t timer;
  bool armed;
};

}  // namespace executor
