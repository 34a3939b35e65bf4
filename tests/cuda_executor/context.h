// Switching between stacks: the whole of what makes a fiber.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && !defined(EXECUTOR_UCONTEXT)

// Twenty instructions, 30 ns a round trip; ucontext makes a system call each way.
extern "C" void executor_switch(void** save_stack_pointer, void* load_stack_pointer);

namespace executor {

struct Context {
  void* stack_pointer = nullptr;
};

inline void switch_context(Context& from, Context& to) { executor_switch(&from.stack_pointer, to.stack_pointer); }

inline void make_context(Context& context, char* stack, size_t size, void (*entry)()) {
  void** top = (void**)((uintptr_t)(stack + size) & ~(uintptr_t)15);
  *--top = nullptr;  // the return address of `entry`, which never returns; it keeps the alignment of the ABI
  *--top = (void*)entry;
  for (int i = 0; i < 6; i++) *--top = nullptr;  // the registers that executor_switch pops
  context.stack_pointer = top;
}

}  // namespace executor

#else
#include <ucontext.h>

namespace executor {

struct Context {
  ucontext_t saved = {};
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }

inline void make_context(Context& context, char* stack, size_t size, void (*entry)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = size;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
}

}  // namespace executor
#endif
