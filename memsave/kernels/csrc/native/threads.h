/* Threads are those of the OpenMP runtime that torch has loaded, if it has: others would compete
   with them, which wait for more work actively. A fork has none of its parent's. (Where these were
   started by torch alone, that does not show, and a fork waits for ever, as in torch's operations.) */

#pragma once

#include <Python.h>

#include "elements.h"

#if defined(__GNUC__) && !defined(_WIN32)
#include <pthread.h>
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
#endif

typedef struct {
    Loop *loop;
    const void *work;
    size count, block; /* A part has whole blocks. */
} Task;

static int has_team, is_fork;

static void in_fork(void) { is_fork = has_team; }

#if defined(__GNUC__) && !defined(_WIN32)
static void part(void *data) {
    const Task *task = data;
    const size threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const size blocks = (task->count + task->block - 1) / task->block;
    const size each = (blocks + threads - 1) / threads * task->block;
    const size start = thread * each, end = start + each;
    if (start < task->count)
        task->loop(task->work, start, end < task->count ? end : task->count, thread);
}
#endif

static void run(Task task, size threads, size elements) {
    if (!task.count) return;
#if defined(__GNUC__) && !defined(_WIN32)
    if (threads > 1 && elements > GRAIN && !is_fork && GOMP_parallel && omp_get_thread_num &&
        omp_get_num_threads) {
        has_team = 1;
        GOMP_parallel(part, &task, (unsigned)threads, 0);
        return;
    }
#endif
    task.loop(task.work, 0, task.count, 0);
}

static void in_threads(Task task, size threads, size elements) {
    Py_BEGIN_ALLOW_THREADS;
    run(task, threads, elements);
    Py_END_ALLOW_THREADS;
}

/* Over bits: whole bytes of them, and vectors. */
static void run_over_bits(Loop *loop, const Arrays *arrays, size elements, size threads) {
    run((Task){loop, arrays, elements, 4096}, threads, elements);
}
