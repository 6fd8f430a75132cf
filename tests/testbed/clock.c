/* Shifts the wall clock of a process by CLOCK_OFFSET seconds, as a host with a wrong clock has it; preloaded.
 *
 * Monotonic clocks are right. Deadlines on the wall clock are shifted back. Above 10^9 s a deadline is on the wall clock.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t offset;
__attribute__((constructor)) static void begin(void) {
  const char *seconds = getenv("CLOCK_OFFSET");
  offset = seconds ? atol(seconds) : 0;
}

static void *next(const char *name) {
  void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2"); /* the newer of two condition variables */
  return found ? found : dlsym(RTLD_NEXT, name);
}

static struct timespec real(const struct timespec *deadline) {
  struct timespec shifted = *deadline;
  if (shifted.tv_sec > 1000000000) shifted.tv_sec -= offset;
  return shifted;
}

#define NEXT(name) static __typeof__(name) *original; if (!original) original = next(#name)

int clock_gettime(clockid_t clock, struct timespec *now) {
  NEXT(clock_gettime);
  int failed = original(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset;
  return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
  NEXT(gettimeofday);
  int failed = original(now, zone);
  if (!failed) now->tv_sec += offset;
  return failed;
}
time_t time(time_t *now) {
  struct timespec read;
  clock_gettime(CLOCK_REALTIME, &read);
  if (now) *now = read.tv_sec;
  return read.tv_sec;
}

#define SHIFTED(name, parameters, ...)                                    \
  int name parameters {                                                   \
    NEXT(name);                                                           \
    struct timespec shifted = real(deadline);                             \
    deadline = &shifted;                                                  \
    return original(__VA_ARGS__);                                         \
  }
typedef const struct timespec *deadline_t;
SHIFTED(pthread_cond_timedwait, (pthread_cond_t * c, pthread_mutex_t *m, deadline_t deadline), c, m, deadline)
SHIFTED(pthread_cond_clockwait, (pthread_cond_t * c, pthread_mutex_t *m, clockid_t k, deadline_t deadline), c, m, k, deadline)
SHIFTED(pthread_mutex_timedlock, (pthread_mutex_t * m, deadline_t deadline), m, deadline)
SHIFTED(sem_timedwait, (sem_t * s, deadline_t deadline), s, deadline)
SHIFTED(sem_clockwait, (sem_t * s, clockid_t k, deadline_t deadline), s, k, deadline)
