// Runs the blocks of a launch one after another, and the threads of a block as fibers in a chosen order.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>

#include "launch.h"

#if defined(__x86_64__) && !defined(EXECUTOR_UCONTEXT)
asm(R"(
.text
.globl executor_switch
.hidden executor_switch
.type executor_switch,@function
executor_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size executor_switch,.-executor_switch
.section .note.GNU-stack,"",@progbits
.text
)");
#endif

namespace executor {

Launch* launch EXECUTOR_GLOBAL = nullptr;
Fiber* current EXECUTOR_GLOBAL = nullptr;
static char* stacks EXECUTOR_GLOBAL = nullptr;

uint3 thread_index() { return current->index; }
uint3 block_index() { return launch->block_index; }
dim3 block_size() { return launch->block; }
dim3 grid_size() { return launch->grid; }
unsigned lane() { return current->lane; }
unsigned char* dynamic_shared_memory() { return launch->dynamic_shared; }

void leave_fiber() { switch_context(current->context, launch->scheduler); }

void fail(const char* format, ...) {
  if (!launch->failed) {
    int used = snprintf(launch->message, sizeof launch->message, "block %u thread %u: ", launch->block_number,
                        current->number);
    va_list values;
    va_start(values, format);
    vsnprintf(launch->message + used, sizeof launch->message - (size_t)used, format, values);
    va_end(values);
    launch->failed = true;
  }
  leave_fiber();  // nobody resumes it: the launch ends
  __builtin_unreachable();
}

static void entry() {
  launch->kernel(launch->arguments);
  current->state = State::done;
  launch->alive--;
  if (launch->barrier.waiting) {
    fail("exits while %u thread(s) wait at __syncthreads in line %d", launch->barrier.waiting, launch->barrier.line);
  }
  leave_fiber();
}

static void release_barrier() {
  for (Fiber& fiber : launch->fibers) {
    fiber.state = State::ready;
    fiber.verdict = launch->barrier.value;
  }
  launch->barrier.waiting = 0;
  launch->epoch++;
}

int barrier(int line, Reduction reduction, int value) {
  Barrier& b = launch->barrier;
  if (launch->alive != launch->thread_count) {
    fail("__syncthreads at line %d after %u thread(s) of the block have exited", line,
         launch->thread_count - launch->alive);
  }
  if (!b.waiting) {
    b.line = line;
    b.value = reduction == Reduction::all;
  } else if (b.line != line) {
    fail("barrier divergence: __syncthreads at line %d while others wait at line %d", line, b.line);
  }
  if (reduction == Reduction::count) b.value += value != 0;
  if (reduction == Reduction::all) b.value &= value != 0;
  if (reduction == Reduction::any) b.value |= value != 0;
  current->state = State::at_barrier;
  current->line = line;
  if (++b.waiting == launch->thread_count) release_barrier();
  leave_fiber();
  return current->verdict;
}

static uint64_t* meet(int line, unsigned mask, uint64_t value) {
  if (!(mask >> current->lane & 1)) {
    fail("warp collective at line %d: the calling lane %u is not in mask %08x", line, current->lane, mask);
  }
  Meeting& m = launch->meetings[current->warp * 32 + (unsigned)__builtin_ctz(mask)];
  if (!m.arrived) {
    m.mask = mask;
    m.line = line;
  } else if (m.mask != mask || m.line != line) {
    fail("warp divergence: a collective at line %d with mask %08x meets one at line %d with mask %08x", line, mask,
         m.line, m.mask);
  }
  uint64_t* values = m.values[m.generation & 1];
  values[current->lane] = value;
  m.arrived |= 1u << current->lane;
  current->state = State::in_warp;
  current->line = line;
  if (m.arrived == mask) {
    m.arrived = 0;
    m.generation++;
    for (unsigned i = 0; i < 32; i++) {
      if (mask >> i & 1) launch->fibers[current->warp * 32 + i].state = State::ready;
    }
  }
  leave_fiber();
  return values;
}

void exchange(int line, unsigned mask, uint64_t value, uint64_t (&values)[32]) {
  memcpy(values, meet(line, mask, value), sizeof values);
}

void warp_barrier(int line, unsigned mask) {
  current->warp_epoch++;
  meet(line, mask, 0);
}

static unsigned below(unsigned bound) {
  uint64_t& x = launch->random;  // xorshift64
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return (unsigned)(x % bound);
}

static void shuffle(std::vector<unsigned>& items) {
  for (unsigned i = (unsigned)items.size(); i > 1; i--) std::swap(items[i - 1], items[below(i)]);
}

// The order of one round; with a random schedule every round has another.
static void arrange() {
  const unsigned n = launch->thread_count;
  if (launch->schedule == Schedule::random_threads) shuffle(launch->order);
  if (launch->schedule != Schedule::random_warps) return;
  std::vector<unsigned> warps((n + 31) / 32);
  for (unsigned i = 0; i < warps.size(); i++) warps[i] = i;
  shuffle(warps);
  unsigned next = 0;
  for (unsigned warp : warps) {
    for (unsigned i = warp * 32; i < n && i < warp * 32 + 32; i++) launch->order[next++] = i;
  }
}

static void report_deadlock() {
  unsigned at_barrier = 0, in_warp = 0;
  const Fiber* first = nullptr;
  for (const Fiber& fiber : launch->fibers) {
    at_barrier += fiber.state == State::at_barrier;
    in_warp += fiber.state == State::in_warp;
    if (fiber.state != State::done && !first) first = &fiber;
  }
  snprintf(launch->message, sizeof launch->message,
           "block %u: deadlock: %u thread(s) at __syncthreads, %u in a warp collective, %u exited; "
           "first: thread %u at line %d",
           launch->block_number, at_barrier, in_warp, launch->thread_count - launch->alive, first->number, first->line);
  launch->failed = true;
}

static void run_block(unsigned number) {
  launch->block_number = number;
  launch->block_index = uint3{number % launch->grid.x, number / launch->grid.x % launch->grid.y,
                              number / launch->grid.x / launch->grid.y};
  launch->alive = launch->thread_count;
  launch->barrier = Barrier{};
  launch->epoch++;
  for (Meeting& meeting : launch->meetings) meeting = Meeting{};
  for (Fiber& fiber : launch->fibers) {
    fiber.state = State::ready;
    fiber.line = 0;
    fiber.warp_epoch = 0;
    make_context(fiber.context, fiber.stack, STACK_SIZE, entry);
  }
  while (launch->alive && !launch->failed) {
    bool progress = false;
    arrange();
    for (unsigned next : launch->order) {
      Fiber& fiber = launch->fibers[next];
      if (fiber.state != State::ready) continue;
      progress = true;
      current = &fiber;
      switch_context(launch->scheduler, fiber.context);
      current = nullptr;
      if (launch->failed) return;
    }
    if (!progress) report_deadlock();
  }
}

// Below each stack lies a page that traps.
static char* stack_of(unsigned thread) { return stacks + (STACK_SIZE + PAGE) * thread + PAGE; }

static void make_fibers() {
  const unsigned n = launch->thread_count;
  launch->fibers.resize(n);
  launch->order.resize(n);
  launch->meetings.resize((n + 31) / 32 * 32);
  for (unsigned i = 0; i < n; i++) {
    Fiber& fiber = launch->fibers[i];
    fiber.index = uint3{i % launch->block.x, i / launch->block.x % launch->block.y,
                        i / launch->block.x / launch->block.y};
    fiber.number = i;
    fiber.lane = i % 32;
    fiber.warp = i / 32;
    fiber.stack = stack_of(i);
    launch->order[i] = launch->schedule == Schedule::reverse ? n - 1 - i : i;
  }
}

static void run_blocks(size_t shared_bytes) {
  const unsigned blocks = launch->grid.x * launch->grid.y * launch->grid.z;
  const size_t static_bytes = (size_t)(_end - __bss_start);
  for (unsigned i = 0; i < blocks && !launch->failed; i++) {
    memset(launch->dynamic_shared, 0xA5, shared_bytes);
    memset(__bss_start, 0xA5, static_bytes);
    run_block(launch->schedule == Schedule::reverse ? blocks - 1 - i : i);
  }
  memset(__bss_start, 0, static_bytes);
}

}  // namespace executor

extern "C" {

struct Buffer {
  uintptr_t address;
  size_t size;
  int read_only;
  const char* name;
};

// Kept between launches, and used by all libraries of a process: to map them anew takes longer than most tests' kernels,
// and a process may have 65,530 mappings, of which these are 2,048.
char* executor_stacks() {
  using namespace executor;
  const size_t step = STACK_SIZE + PAGE;
  char* made = (char*)mmap(nullptr, step * MAX_THREADS, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (unsigned i = 0; i < MAX_THREADS; i++) mprotect(made + step * i, PAGE, PROT_NONE);
  return made;
}

// As module.py declares it.
struct Request {
  void (*kernel)(void**);
  void** arguments;
  unsigned grid[3], block[3], shared_bytes;
  int schedule;
  uint64_t seed;
  double cpu_seconds;
  const Buffer* buffers;
  size_t buffer_count;
  char* message;
  size_t message_size;
  uint64_t* accesses;
  char* stacks;
};

// Returns 0, or 1 with a message.
int executor_launch(const Request* request) {
  using namespace executor;
  Launch state = {};
  stacks = request->stacks;
  state.kernel = request->kernel;
  state.arguments = request->arguments;
  state.grid = dim3{request->grid[0], request->grid[1], request->grid[2]};
  state.block = dim3{request->block[0], request->block[1], request->block[2]};
  state.thread_count = state.block.x * state.block.y * state.block.z;
  state.schedule = (Schedule)request->schedule;
  state.accesses = request->accesses;
  state.random = request->seed * 2654435761u + 88172645463325252ull;
  for (size_t i = 0; i < request->buffer_count; i++) {
    const Buffer& buffer = request->buffers[i];
    const Kind kind = buffer.read_only ? Kind::read_only : Kind::written;
    state.regions.push_back({buffer.address, buffer.address + buffer.size, kind, buffer.name, {}});
  }
  // Dynamic shared memory ends where a page begins that traps.
  const size_t rounded = (request->shared_bytes + PAGE - 1) / PAGE * PAGE;
  char* pages = (char*)mmap(nullptr, rounded + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(pages + rounded, PAGE, PROT_NONE);
  state.dynamic_shared = (unsigned char*)pages + rounded - (request->shared_bytes + 15u) / 16u * 16u;
  const uintptr_t dynamic = (uintptr_t)state.dynamic_shared;
  state.regions.push_back({dynamic, dynamic + request->shared_bytes, Kind::shared, "dynamic __shared__", {}});
  state.regions.push_back({(uintptr_t)__bss_start, (uintptr_t)_end, Kind::shared, "static __shared__", {}});
  launch = &state;
  {
    Watchdog watchdog(request->cpu_seconds);
    make_fibers();
    run_blocks(request->shared_bytes);
  }
  launch = nullptr;
  current = nullptr;
  munmap(pages, rounded + PAGE);
  if (state.failed) snprintf(request->message, request->message_size, "%s", state.message);
  return state.failed;
}
}
