/* Fails chosen file operations below one folder; benchmarks/disk_faults.py preloads it.

   Operations are numbered from 1 in the order in which they occur. `faults_arm` starts the count in
   a process. TensorFlow writes through stdio, whose inner calls a preloaded library cannot see, so
   fopen, fwrite, fflush and fclose are operations too; what they had buffered is lost, as on a disk.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t length;
static long counted, wanted;
static int error, lasting, only_changes, trace = -1;

/* Fails operation `number` below `path` with `code`, or sends the signal -`code` before it;
   `forever`: and all later ones; `changes`: reading does not count. Each operation is a line in the file `log`, if it is not "". */
void faults_arm(const char *path, long number, int code, int forever, int changes, const char *log) {
  trace = *log ? syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC, 0644) : -1;
  error = code, lasting = forever, only_changes = changes, wanted = number, counted = 0;
  length = strlen(strcpy(folder, path));
}

long faults_counted(void) { return counted; }

static int is_below(const char *path) {
  return length && path && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int fails(const char *call, const char *path, int changes) {
  if (!is_below(path) || (only_changes && !changes)) return 0;
  long number = __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST);
  if (trace >= 0) {
    char line[PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%ld\t%s\t%s\n", number, call, path + length);
    syscall(SYS_write, trace, line, size);
  }
  if (!wanted || (lasting ? number < wanted : number != wanted)) return 0;
  if (error < 0) {
    if (number == wanted) kill(getpid(), -error);
    return 0;
  }
  errno = error;
  return 1;
}

static const char *of_fd(int fd, char *path) {
  char name[64];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t size = length ? syscall(SYS_readlink, name, path, PATH_MAX - 1) : -1;
  path[size < 0 ? 0 : size] = 0;
  return path;
}

static const char *at(int fd, const char *name, char *path) {
  if (!length || !name || *name == '/' || fd == AT_FDCWD) return name;
  size_t size = strlen(of_fd(fd, path));
  snprintf(path + size, PATH_MAX - size, "/%s", name);
  return path;
}

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & O_CREAT))
#define MODE(last) \
  mode_t mode = 0; \
  if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list list; va_start(list, last); mode = va_arg(list, mode_t); va_end(list); \
  }

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    MODE(flags) \
    REAL(int, name, const char *, int, ...); \
    return fails(#name, path, WRITES(flags)) ? -1 : real(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int fd, const char *path, int flags, ...) { \
    MODE(flags) \
    char buffer[PATH_MAX]; \
    REAL(int, name, int, const char *, int, ...); \
    return fails(#name, at(fd, path, buffer), WRITES(flags)) ? -1 : real(fd, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
  FILE *name(const char *path, const char *mode) { \
    REAL(FILE *, name, const char *, const char *); \
    return fails(#name, path, *mode != 'r') ? NULL : real(path, mode); \
  }
FOPEN(fopen)
FOPEN(fopen64)

static int fd_fails(const char *call, int fd) {
  char path[PATH_MAX];
  return length && fails(call, of_fd(fd, path), 1);
}

size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
  REAL(size_t, fwrite, const void *, size_t, size_t, FILE *);
  if (fd_fails("fwrite", fileno(file))) {
    int code = errno;
    size_t written = real(data, size, count / 2, file);
    errno = code;
    return written;
  }
  return real(data, size, count, file);
}

int fflush(FILE *file) {
  REAL(int, fflush, FILE *);
  if (file && fd_fails("fflush", fileno(file))) return __fpurge(file), EOF;
  return real(file);
}

int fclose(FILE *file) {
  REAL(int, fclose, FILE *);
  if (!fd_fails("fclose", fileno(file))) return real(file);
  int code = errno;
  __fpurge(file);
  real(file);
  errno = code;
  return EOF;
}

ssize_t write(int fd, const void *data, size_t size) {
  REAL(ssize_t, write, int, const void *, size_t);
  if (!fd_fails("write", fd)) return real(fd, data, size);
  return lasting && error == ENOSPC && size > 1 && counted == wanted ? real(fd, data, size / 2) : -1;
}

#define FD(type, name, parameters, arguments, ...) \
  type name parameters { \
    REAL(type, name, __VA_ARGS__); \
    return fd_fails(#name, fd) ? -1 : real arguments; \
  }
FD(ssize_t, pwrite, (int fd, const void *p, size_t n, off_t o), (fd, p, n, o),
   int, const void *, size_t, off_t)
FD(ssize_t, pwrite64, (int fd, const void *p, size_t n, off64_t o), (fd, p, n, o),
   int, const void *, size_t, off64_t)
FD(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n),
   int, const struct iovec *, int)
FD(int, fsync, (int fd), (fd), int)
FD(int, fdatasync, (int fd), (fd), int)
FD(int, syncfs, (int fd), (fd), int)
FD(int, ftruncate, (int fd, off_t n), (fd, n), int, off_t)
FD(int, ftruncate64, (int fd, off64_t n), (fd, n), int, off64_t)

#define PATH(name, parameters, arguments, ...) \
  int name parameters { \
    REAL(int, name, __VA_ARGS__); \
    return fails(#name, path, 1) ? -1 : real arguments; \
  }
PATH(unlink, (const char *path), (path), const char *)
PATH(remove, (const char *path), (path), const char *)
PATH(rmdir, (const char *path), (path), const char *)
PATH(mkdir, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
PATH(truncate, (const char *path, off_t n), (path, n), const char *, off_t)
PATH(rename, (const char *from, const char *path), (from, path), const char *, const char *)
PATH(link, (const char *from, const char *path), (from, path), const char *, const char *)
PATH(symlink, (const char *from, const char *path), (from, path), const char *, const char *)

int unlinkat(int fd, const char *path, int flags) {
  char buffer[PATH_MAX];
  REAL(int, unlinkat, int, const char *, int);
  return fails("unlinkat", at(fd, path, buffer), 1) ? -1 : real(fd, path, flags);
}

int mkdirat(int fd, const char *path, mode_t mode) {
  char buffer[PATH_MAX];
  REAL(int, mkdirat, int, const char *, mode_t);
  return fails("mkdirat", at(fd, path, buffer), 1) ? -1 : real(fd, path, mode);
}

int renameat(int from_fd, const char *from, int fd, const char *path) {
  char buffer[PATH_MAX];
  REAL(int, renameat, int, const char *, int, const char *);
  return fails("renameat", at(fd, path, buffer), 1) ? -1 : real(from_fd, from, fd, path);
}
