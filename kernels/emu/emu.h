// emu.h - between emu.cpp (fibers, scheduling, shared memory) and async.cpp (mbarriers, TMA, wgmma).
#ifndef HS_EMU_EMU_H
#define HS_EMU_EMU_H
#include "shim.h"

// The running thread waits until another one releases it.
void hs_emu_park(const char* what, hs_emu_at at);
void hs_emu_unpark(hs_emu_thread* t);
// Goes on with thread t, which can run, at once; the running one stays runnable.
void hs_emu_run_now(hs_emu_thread* t);
// Thread i of the running block.
hs_emu_thread* hs_emu_thread_at(unsigned i);
unsigned hs_emu_num_threads();
const char* hs_emu_base_name(const char* path);
// Where the block's dynamic shared memory ends: the end of the 256 KB that addresses of shared memory count through.
char* hs_emu_shared_end();
void hs_emu_fill_poison(void* p, size_t n);

// What async.cpp knows of a block: forgotten at its start; what is wrong at its end, or 0; what a thread that leaves has in flight (a fault);
// and, for the report of a deadlock, the barriers that threads wait for.
void hs_emu_async_start();
const char* hs_emu_async_end();
void hs_emu_async_leave(const hs_emu_thread* t);
size_t hs_emu_async_waits(char* text, size_t n);
#endif
