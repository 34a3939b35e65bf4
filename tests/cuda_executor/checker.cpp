// The memory checker: bounds, read-only buffers, races, shared memory that nobody has written.
//
// Each byte remembers who wrote and who read it last. Two accesses of one byte, one of them a write, are a race unless
// something orders them: the same thread, a barrier of the block, or one of the warp. Blocks are never ordered.
#include "launch.h"

namespace executor {

static bool before(const Access& earlier, const Access& now) {
  if (earlier.block != now.block) return false;
  if (earlier.thread == now.thread || earlier.epoch != now.epoch) return true;
  const bool same_warp = (earlier.thread - 1) / 32 == (now.thread - 1) / 32;
  return same_warp && earlier.warp_epoch != now.warp_epoch;
}

static bool conflicts(const Access& earlier, const Access& now) {
  return earlier.thread && !(earlier.atomic && now.atomic) && !before(earlier, now);
}

// Of several readers only the last is known by name; what it was ordered before, the others need not have been.
static bool readers_conflict(const Cell& cell, const Access& now) {
  if (conflicts(cell.read, now)) return true;
  if (!cell.read.thread || (cell.read.atomic && now.atomic) || cell.readers == Readers::one) return false;
  return cell.readers == Readers::of_many_blocks || cell.read.epoch == now.epoch;
}

static void remember_read(Cell& cell, const Access& now) {
  const bool apart = cell.read.thread && !before(cell.read, now);
  if (apart && cell.read.block != now.block) cell.readers = Readers::of_many_blocks;
  if (cell.readers != Readers::of_many_blocks) {
    const bool still = cell.readers == Readers::of_a_block && cell.read.epoch == now.epoch;
    cell.readers = apart || still ? Readers::of_a_block : Readers::one;
  }
  cell.read = now;
}

static void check_byte(Region& region, size_t offset, bool write, const Access& now, Place place) {
  Cell& cell = region.cells[offset];
  if (region.kind == Kind::shared && cell.write.block != now.block) cell.write = Access{};  // another block's memory
  if (region.kind == Kind::shared && cell.read.block != now.block) {
    cell.read = Access{};
    cell.readers = Readers::one;
  }
  const char* name = region.name.c_str();
  if (conflicts(cell.write, now)) {
    fail("race: %s of %s+%zu by thread %u, written by block %u thread %u with no barrier between (pc+0x%lx)",
         write ? "write" : "read", name, offset, now.thread - 1, cell.write.block - 1, cell.write.thread - 1,
         place.offset());
  }
  if (write && readers_conflict(cell, now)) {
    fail("race: write of %s+%zu by thread %u, read by block %u thread %u with no barrier between (pc+0x%lx)", name,
         offset, now.thread - 1, cell.read.block - 1, cell.read.thread - 1, place.offset());
  }
  if (region.kind == Kind::shared && !write && !cell.write.thread) {
    fail("read of uninitialized shared memory %s+%zu by thread %u (pc+0x%lx)", name, offset, now.thread - 1,
         place.offset());
  }
  if (!write || now.atomic) remember_read(cell, now);
  if (write) cell.write = now;
}

static void report_stray(uintptr_t address, size_t size, bool write, Place place) {
  const Region* nearest = nullptr;
  uintptr_t shortest = UINTPTR_MAX;
  for (const Region& region : launch->regions) {
    const uintptr_t distance = address < region.begin ? region.begin - address : address - region.end;
    if (distance >= shortest) continue;
    shortest = distance;
    nearest = &region;
  }
  fail("out of bounds: %zu-byte %s where no buffer is; the nearest is %s%+ld (pc+0x%lx)", size,
       write ? "write" : "read", nearest->name.c_str(), (long)(address - nearest->begin), place.offset());
}

void check_access(uintptr_t address, size_t size, bool write, bool atomic, Place place) {
  if (!launch || !current || launch->failed) return;
  if (address - (uintptr_t)current->stack < STACK_SIZE) return;  // its own locals
  const bool is_shared = address >= (uintptr_t)__bss_start && address < (uintptr_t)_end;
  if (!is_shared && address >= (uintptr_t)__ehdr_start && address < (uintptr_t)_end) return;  // a constant
  for (Region& region : launch->regions) {
    if (address < region.begin || address >= region.end) continue;
    const size_t offset = address - region.begin;
    if (address + size > region.end) {
      fail("out of bounds: %zu-byte %s at %s+%zu, %zu past its end (pc+0x%lx)", size, write ? "write" : "read",
           region.name.c_str(), offset, (size_t)(address + size - region.end), place.offset());
    }
    if (write && region.kind == Kind::read_only) {
      fail("write to the read-only buffer %s+%zu (pc+0x%lx)", region.name.c_str(), offset, place.offset());
    }
    if (region.kind == Kind::written && size <= 16) launch->accesses[__builtin_ctzll(size)]++;
    if (region.cells.empty()) region.cells.resize(region.end - region.begin);
    const uint16_t warp_epoch = (uint16_t)current->warp_epoch;
    const Access now = {current->number + 1, launch->block_number + 1, launch->epoch, warp_epoch, atomic};
    for (size_t i = 0; i < size; i++) check_byte(region, offset + i, write, now, place);
    return;
  }
  report_stray(address, size, write, place);
}

}  // namespace executor
