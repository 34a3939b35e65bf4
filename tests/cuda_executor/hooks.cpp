// What a kernel compiled with -fsanitize=thread,undefined calls at each access and each undefined operation. These are
// our own functions of those names: no sanitizer's library is linked, so a checked kernel runs inside any process.
#include <cstdlib>

#include "launch.h"

#define HERE executor::Place{__builtin_return_address(0)}

namespace {

void access(const volatile void* pointer, size_t size, bool write, executor::Place place) {
  executor::check_access((uintptr_t)pointer, size, write, false, place);
}

void aligned_access(const volatile void* pointer, size_t size, bool write, executor::Place place) {
  if (((uintptr_t)pointer & (size - 1)) && executor::current) {
    executor::fail("misaligned %zu-byte access (pc+0x%lx)", size, place.offset());
  }
  access(pointer, size, write, place);
}

void atomic_access(const volatile void* pointer, size_t size, bool write, executor::Place place) {
  executor::check_access((uintptr_t)pointer, size, write, true, place);
}

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, size_t n) { access(p, n, false, HERE); }
void __tsan_write_range(void* p, size_t n) { access(p, n, true, HERE); }
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

#define PLAIN(size) \
  void __tsan_read##size(void* p) { aligned_access(p, size, false, HERE); } \
  void __tsan_write##size(void* p) { aligned_access(p, size, true, HERE); } \
  void __tsan_unaligned_read##size(void* p) { access(p, size, false, HERE); } \
  void __tsan_unaligned_write##size(void* p) { access(p, size, true, HERE); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)

#define CHANGE(bits, T, change) \
  T __tsan_atomic##bits##_##change(volatile T* p, T v, int) { \
    atomic_access(p, sizeof(T), true, HERE); \
    return __atomic_##change(p, v, 0); \
  }
#define COMPARE(bits, T, strength) \
  int __tsan_atomic##bits##_compare_exchange_##strength(volatile T* p, T* expected, T v, int, int) { \
    atomic_access(p, sizeof(T), true, HERE); \
    return __atomic_compare_exchange_n(p, expected, v, false, 0, 0); \
  }
#define ATOMIC(bits, T) \
  T __tsan_atomic##bits##_load(const volatile T* p, int) { \
    atomic_access(p, sizeof(T), false, HERE); \
    return *p; \
  } \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) { \
    atomic_access(p, sizeof(T), true, HERE); \
    *p = v; \
  } \
  T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) { \
    atomic_access(p, sizeof(T), true, HERE); \
    return __atomic_exchange_n(p, v, 0); \
  } \
  CHANGE(bits, T, fetch_add) \
  CHANGE(bits, T, fetch_sub) \
  CHANGE(bits, T, fetch_or) \
  CHANGE(bits, T, fetch_and) \
  CHANGE(bits, T, fetch_xor) \
  COMPARE(bits, T, strong) \
  COMPARE(bits, T, weak)
ATOMIC(8, unsigned char)
ATOMIC(16, unsigned short)
ATOMIC(32, unsigned int)
ATOMIC(64, unsigned long)

// Each handler's first argument begins with the place in the source.
struct SourcePlace {
  const char* file;
  unsigned line, column;
};

#define UNDEFINED_AS(name, words) \
  [[noreturn]] void __ubsan_handle_##name(SourcePlace* place, ...) { \
    if (!executor::current) abort(); \
    executor::fail("undefined behavior: %s (%s:%u)", words, place->file, place->line); \
  }
UNDEFINED_AS(type_mismatch_v1_abort, "a misaligned or null pointer")
UNDEFINED_AS(shift_out_of_bounds_abort, "a shift out of bounds")
UNDEFINED_AS(out_of_bounds_abort, "an index out of bounds")
UNDEFINED_AS(add_overflow_abort, "an addition that overflows")
UNDEFINED_AS(sub_overflow_abort, "a subtraction that overflows")
UNDEFINED_AS(mul_overflow_abort, "a product that overflows")
UNDEFINED_AS(negate_overflow_abort, "a negation that overflows")
UNDEFINED_AS(divrem_overflow_abort, "a division by zero or one that overflows")
UNDEFINED_AS(load_invalid_value_abort, "a value that its type does not have")
UNDEFINED_AS(pointer_overflow_abort, "a pointer that overflows")
UNDEFINED_AS(float_cast_overflow_abort, "a cast of a float that overflows")
UNDEFINED_AS(vla_bound_not_positive_abort, "an array without a size")
UNDEFINED_AS(nonnull_arg_abort, "a null argument")
UNDEFINED_AS(nonnull_return_v1_abort, "a null result")
UNDEFINED_AS(invalid_builtin_abort, "a built-in function of zero")
UNDEFINED_AS(missing_return, "a missing return")
UNDEFINED_AS(builtin_unreachable, "code that cannot be reached")
}
