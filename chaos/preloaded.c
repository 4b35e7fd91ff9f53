/* Preloaded into a driver and its workers (chaos/preload.py): shifts the clock of one process, and makes writes to
 * chosen files fail as on a full disk, or take long. What it does is in a file that all these processes map; it does
 * nothing after a time by the monotonic clock, so that it ends by itself. Every other call is passed on unchanged. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NOTHING, FULL, SLOW };

struct control {                 /* preload.py: LAYOUT */
    int64_t until_ns;            /* CLOCK_MONOTONIC */
    int64_t clock_pid;           /* the process whose clock is shifted; 0: none */
    int64_t clock_shift_ns;
    int64_t action;              /* on files that match */
    int64_t delay_ns;
    int64_t hits;                /* number of calls that failed or were delayed */
    char pattern[464];           /* of whole paths, as in fnmatch(3) */
};

static struct control *control;
static int (*next_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("RLHF_RAY_CHAOS_PRELOAD");
    int descriptor = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    next_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (descriptor < 0)
        return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (mapped != MAP_FAILED)
        control = mapped;
}

static int is_on(void) {
    struct timespec now;
    if (!control || !control->until_ns || !next_clock_gettime || next_clock_gettime(CLOCK_MONOTONIC, &now))
        return 0;
    return now.tv_sec * 1000000000LL + now.tv_nsec < control->until_ns;
}

static int64_t shift_ns(void) {
    return control && control->clock_pid && control->clock_pid == getpid() && is_on() ? control->clock_shift_ns : 0;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    if (!next_clock_gettime)     /* called by another library's constructor */
        next_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = next_clock_gettime(id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift_ns() / 1000000000LL;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact))
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return -1;
    if (where)
        *where = now.tv_sec;
    return now.tv_sec;
}

/* Whether a call on this file fails, after the delay that it gets. */
static int is_refused(int descriptor, int may_fail) {
    char link[64], path[PATH_MAX];
    if (!control || control->action == NOTHING || !is_on())
        return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length <= 0)
        return 0;
    path[length] = 0;
    if (fnmatch(control->pattern, path, 0))
        return 0;
    if (control->action == SLOW) {
        struct timespec delay = {control->delay_ns / 1000000000LL, control->delay_ns % 1000000000LL};
        __atomic_add_fetch(&control->hits, 1, __ATOMIC_RELAXED);
        nanosleep(&delay, NULL);
        errno = before;
        return 0;
    }
    if (!may_fail)
        return 0;
    __atomic_add_fetch(&control->hits, 1, __ATOMIC_RELAXED);
    errno = ENOSPC;
    return 1;
}

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define WRITER(type, name, parameters, arguments)                                                                     \
    type name parameters {                                                                                            \
        NEXT(name);                                                                                                   \
        return is_refused(fd, 1) ? -1 : next arguments;                                                               \
    }

WRITER(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
WRITER(ssize_t, writev, (int fd, const struct iovec *data, int count), (fd, data, count))
WRITER(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
WRITER(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
WRITER(ssize_t, copy_file_range, (int from, off64_t *from_at, int fd, off64_t *at, size_t size, unsigned flags),
       (from, from_at, fd, at, size, flags))
ssize_t sendfile(int, int, off_t *, size_t);
ssize_t sendfile64(int, int, off64_t *, size_t);
WRITER(ssize_t, sendfile, (int fd, int from, off_t *at, size_t size), (fd, from, at, size))
WRITER(ssize_t, sendfile64, (int fd, int from, off64_t *at, size_t size), (fd, from, at, size))
WRITER(int, ftruncate, (int fd, off_t size), (fd, size))
WRITER(int, ftruncate64, (int fd, off64_t size), (fd, size))
int fallocate(int, int, off_t, off_t);
int fallocate64(int, int, off64_t, off64_t);
WRITER(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
WRITER(int, fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))

/* Once a write has failed, the disk is full for everyone who asks. */
#define ASKER(name)                                                                                                   \
    int name(const char *path, struct name *answer) {                                                                 \
        NEXT(name);                                                                                                   \
        int failed = next(path, answer);                                                                              \
        if (!failed && control && control->action == FULL && control->hits && is_on())                                \
            answer->f_bavail = answer->f_bfree = 0;                                                                   \
        return failed;                                                                                                \
    }

ASKER(statvfs)
ASKER(statvfs64)

#define FLUSHER(name)                                                                                                 \
    int name(int fd) {                                                                                                \
        NEXT(name);                                                                                                   \
        is_refused(fd, 0);                                                                                            \
        return next(fd);                                                                                              \
    }

FLUSHER(fsync)
FLUSHER(fdatasync)
