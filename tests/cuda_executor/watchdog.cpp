// Stops a kernel that runs for ever. A fiber gives way at barriers only, so a signal has to interrupt it.
#include <csignal>
#include <cstdio>
#include <ctime>

#include <sys/syscall.h>
#include <unistd.h>

#include "launch.h"

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace executor {

static struct sigaction previous EXECUTOR_GLOBAL = {};

static int number() { return SIGRTMAX - 3; }

static void stop(int) {
  if (!launch || launch->failed) return;
  snprintf(launch->message, sizeof launch->message, "block %u: still running after its time limit",
           launch->block_number);
  launch->failed = true;
  // On the scheduler's own stack, between two fibers, it is enough to have said so. On a fiber's the handler never
  // returns: the launch ends, and the destructor below lets the signal in again.
  const char* here = (const char*)__builtin_frame_address(0);
  if (current && here >= current->stack && here < current->stack + STACK_SIZE) leave_fiber();
}

// The time is that of this thread's own work: a busy machine makes no kernel late.
Watchdog::Watchdog(double cpu_seconds) {
  struct sigaction action = {};
  action.sa_handler = stop;
  sigemptyset(&action.sa_mask);
  sigaction(number(), &action, &previous);
  struct sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = number();
  event.sigev_notify_thread_id = (int)syscall(SYS_gettid);
  armed = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) == 0;
  if (!armed) return;
  struct itimerspec limit = {};
  limit.it_value.tv_sec = (time_t)cpu_seconds;
  limit.it_value.tv_nsec = (long)((cpu_seconds - (double)(time_t)cpu_seconds) * 999999998) + 1;  // zero is for ever
  timer_settime(timer, 0, &limit, nullptr);
}

Watchdog::~Watchdog() {
  if (armed) timer_delete(timer);
  sigset_t ours;
  sigemptyset(&ours);
  sigaddset(&ours, number());
  pthread_sigmask(SIG_UNBLOCK, &ours, nullptr);
  sigaction(number(), &previous, nullptr);
}

}  // namespace executor
