/* The C twin of block_moves.py: blocks copied between pools, sent from one, received into one.

   A pool is a C-contiguous buffer of bytes of shape [blocks, bytes per block], ids are int32 and are checked. While a
   call works it holds no GIL, from its first byte to its last: with a busy interpreter each turn of the GIL takes as
   long as a megabyte. It holds its buffers instead, so the pool stays mapped. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>

#ifndef SOURCE_HASH
#define SOURCE_HASH ""
#endif

/* What the kernel takes in one call (IOV_MAX). */
enum { MAX_IOVECS = 1024 };
/* In one call: the kernel takes no endless timeout. */
#define MAX_WAIT_S 3600.0

/* ---- pools and ids ---- */

typedef struct {
    Py_buffer pool, ids;
} Blocks;

static const int32_t *ids_of(const Blocks *blocks)
{
    return blocks->ids.buf;
}

static Py_ssize_t count_of(const Blocks *blocks)
{
    return blocks->ids.shape[0];
}

static size_t block_size(const Blocks *blocks)
{
    return (size_t)blocks->pool.shape[1];
}

static char *address(const Blocks *blocks, int32_t id)
{
    return (char *)blocks->pool.buf + (size_t)id * block_size(blocks);
}

static int get_array(PyObject *object, Py_buffer *view, int flags, int num_dimensions, const char *format)
{
    if (PyObject_GetBuffer(object, view, flags | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return -1;
    if (view->ndim == num_dimensions && strcmp(view->format, format) == 0)
        return 0;
    PyErr_Format(PyExc_TypeError, "expected an array of %d dimensions and format '%s', not %d and '%s'",
                 num_dimensions, format, view->ndim, view->format);
    PyBuffer_Release(view);
    return -1;
}

static void release(Blocks *blocks)
{
    PyBuffer_Release(&blocks->pool);
    PyBuffer_Release(&blocks->ids);
}

/* The place of the first id that no block has, or -1. */
static Py_ssize_t find_wrong(const Py_buffer *ids, Py_ssize_t num_blocks)
{
    const int32_t *values = ids->buf;
    for (Py_ssize_t i = 0; i < ids->shape[0]; i++)
        if (values[i] < 0 || values[i] >= num_blocks)
            return i;
    return -1;
}

static PyObject *are_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *object;
    Py_ssize_t num_blocks;
    Py_buffer ids;
    if (!PyArg_ParseTuple(args, "On:are_blocks", &object, &num_blocks))
        return NULL;
    if (get_array(object, &ids, PyBUF_SIMPLE, 1, "i") < 0) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    Py_ssize_t wrong = find_wrong(&ids, num_blocks);
    PyBuffer_Release(&ids);
    return PyBool_FromLong(wrong < 0);
}

/* To be released afterwards, unless it fails. */
static int get_blocks(Blocks *blocks, PyObject *pool, PyObject *ids, int flags)
{
    if (get_array(pool, &blocks->pool, flags, 2, "B") < 0)
        return -1;
    if (get_array(ids, &blocks->ids, PyBUF_SIMPLE, 1, "i") < 0) {
        PyBuffer_Release(&blocks->pool);
        return -1;
    }
    Py_ssize_t num_blocks = blocks->pool.shape[0], wrong = find_wrong(&blocks->ids, num_blocks);
    if (wrong >= 0) {
        PyErr_Format(PyExc_ValueError, "the pool has blocks 0 to %zd, and block %d was asked for", num_blocks - 1,
                     (int)ids_of(blocks)[wrong]);
        release(blocks);
        return -1;
    }
    return 0;
}

static PyObject *copy_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *source_pool, *source_ids, *target_pool, *target_ids;
    Blocks source, target;
    if (!PyArg_ParseTuple(args, "OOOO:copy", &source_pool, &source_ids, &target_pool, &target_ids) ||
        get_blocks(&source, source_pool, source_ids, PyBUF_SIMPLE) < 0)
        return NULL;
    if (get_blocks(&target, target_pool, target_ids, PyBUF_WRITABLE) < 0) {
        release(&source);
        return NULL;
    }
    if (count_of(&source) != count_of(&target))
        PyErr_Format(PyExc_ValueError, "%zd source and %zd target blocks were given; pairs of them are copied",
                     count_of(&source), count_of(&target));
    else if (block_size(&source) != block_size(&target))
        PyErr_Format(PyExc_ValueError, "blocks have %zu bytes in the source and %zu in the target",
                     block_size(&source), block_size(&target));
    else {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count_of(&source); i++)
            memmove(address(&target, ids_of(&target)[i]), address(&source, ids_of(&source)[i]), block_size(&source));
        Py_END_ALLOW_THREADS
    }
    release(&source);
    release(&target);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* ---- streams ---- */

/* What is still to be moved: the parts [first, end), of which the first is the header, then blocks from `next` on. */
typedef struct {
    int socket;
    Py_buffer header;
    Blocks blocks;
    double deadline;
    struct iovec parts[MAX_IOVECS];
    int first, end;
    Py_ssize_t next;
} Stream;

/* Why a stream cannot go on, beside the numbers of errno, which are positive. */
enum { PEER_ENDED = -1, OUT_OF_TIME = -2 };

static int has_parts(const Stream *stream)
{
    return stream->first < stream->end;
}

/* Add as many runs of neighbouring blocks as one call takes. */
static void add_runs(Stream *stream)
{
    const int32_t *ids = ids_of(&stream->blocks);
    Py_ssize_t count = count_of(&stream->blocks);
    while (stream->next < count && stream->end < MAX_IOVECS) {
        Py_ssize_t start = stream->next++;
        while (stream->next < count && ids[stream->next] == ids[stream->next - 1] + 1)
            stream->next++;
        size_t size = (size_t)(stream->next - start) * block_size(&stream->blocks);
        stream->parts[stream->end++] = (struct iovec){address(&stream->blocks, ids[start]), size};
    }
}

/* Take off what has been moved; whether those were all parts. */
static int advance(Stream *stream, size_t size)
{
    for (; has_parts(stream); stream->first++) {
        struct iovec *part = &stream->parts[stream->first];
        if (size < part->iov_len) {
            part->iov_base = (char *)part->iov_base + size;
            part->iov_len -= size;
            return 0;
        }
        size -= part->iov_len;
    }
    stream->first = stream->end = 0;
    return 1;
}

static struct msghdr message_of(Stream *stream)
{
    return (struct msghdr){
        .msg_iov = stream->parts + stream->first,
        .msg_iovlen = (size_t)(stream->end - stream->first),
    };
}

/* Begin to load what the next call moves, at one place in each page. The processor then looks the pages up side by
   side: scattered blocks of 6 KiB cost a fifth less. No more pages than it remembers. */
static void preload(const Stream *stream)
{
    enum { PAGE_SIZE = 4096, MAX_PAGES = 1024 };
    int num_pages = 0;
    for (int i = stream->first; i < stream->end; i++)
        for (size_t at = 0; at < stream->parts[i].iov_len && num_pages < MAX_PAGES; at += PAGE_SIZE, num_pages++)
            __builtin_prefetch((const char *)stream->parts[i].iov_base + at);
}

static double monotonic(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Returns zero, or why it could not go on; EINTR if signals are to be looked at, after which it is called again. */
static int send_all(Stream *stream)
{
    for (;;) {
        add_runs(stream);
        if (!has_parts(stream))
            return 0;
        double rest = stream->deadline - monotonic();
        /* Written so that it holds for NaN. */
        if (!(rest > 0))
            return OUT_OF_TIME;
        if (rest > MAX_WAIT_S)
            rest = MAX_WAIT_S;
        /* The kernel's own timeout: one call moves all, however often it must wait. Zero would mean none. */
        struct timeval timeout = {(time_t)rest, 1 + (suseconds_t)((rest - (double)(time_t)rest) * 999998)};
        if (setsockopt(stream->socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout) < 0)
            return errno;
        preload(stream);
        struct msghdr message = message_of(stream);
        ssize_t size = sendmsg(stream->socket, &message, MSG_NOSIGNAL);
        if (size < 0 && errno != EAGAIN)
            return errno;
        /* A call that a signal has ended early tells no more than how much it has moved. */
        if (size >= 0 && !advance(stream, (size_t)size))
            return EINTR;
    }
}

static int receive_parts(Stream *stream)
{
    while (has_parts(stream)) {
        preload(stream);
        struct msghdr message = message_of(stream);
        ssize_t size = recvmsg(stream->socket, &message, MSG_WAITALL);
        if (size <= 0)
            return size ? errno : PEER_ENDED;
        if (!advance(stream, (size_t)size))
            return EINTR;
    }
    return 0;
}

static int announces_blocks(const Stream *stream)
{
    const char *header = stream->header.buf;
    for (Py_ssize_t i = 0; i < stream->header.len; i++)
        if (header[i])
            return 0;
    return 1;
}

/* As `send_all`. */
static int receive_all(Stream *stream)
{
    int error = receive_parts(stream);
    while (!error && stream->next < count_of(&stream->blocks) && announces_blocks(stream)) {
        add_runs(stream);
        error = receive_parts(stream);
    }
    return error;
}

static void set_exception(int error)
{
    if (error == PEER_ENDED)
        PyErr_SetString(PyExc_ConnectionResetError, "the peer closed the connection");
    else if (error == OUT_OF_TIME)
        PyErr_SetString(PyExc_TimeoutError, "out of time");
    else {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
}

/* Do it, and let go of the header. Returns -1 with an exception if it failed. */
static int move(Stream *stream, int (*move_all)(Stream *), PyObject *socket, PyObject *pool, PyObject *ids, int flags)
{
    int error = -1;
    stream->socket = PyObject_AsFileDescriptor(socket);
    if (stream->socket >= 0 && get_blocks(&stream->blocks, pool, ids, flags) == 0) {
        stream->parts[0] = (struct iovec){stream->header.buf, (size_t)stream->header.len};
        stream->end = stream->header.len > 0;
        do {
            Py_BEGIN_ALLOW_THREADS
            error = move_all(stream);
            Py_END_ALLOW_THREADS
        } while (error == EINTR && PyErr_CheckSignals() == 0);
        if (error && !PyErr_Occurred())
            set_exception(error);
        release(&stream->blocks);
    }
    PyBuffer_Release(&stream->header);
    return error ? -1 : 0;
}

static PyObject *send_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *socket, *pool, *ids;
    Stream stream;
    stream.first = stream.end = 0;
    stream.next = 0;
    if (!PyArg_ParseTuple(args, "Oy*OOd:send", &socket, &stream.header, &pool, &ids, &stream.deadline) ||
        move(&stream, send_all, socket, pool, ids, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *receive_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *socket, *pool, *ids;
    Stream stream;
    stream.first = stream.end = 0;
    stream.next = 0;
    if (!PyArg_ParseTuple(args, "Ow*OO:receive", &socket, &stream.header, &pool, &ids) ||
        move(&stream, receive_all, socket, pool, ids, PyBUF_WRITABLE) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- module ---- */

static int execute(PyObject *module)
{
    return PyModule_AddStringConstant(module, "SOURCE_HASH", SOURCE_HASH);
}

static PyMethodDef methods[] = {
    {"are_blocks", are_blocks, METH_VARARGS, "are_blocks($module, ids, num_blocks, /)\n--\n\n"},
    {"copy", copy_blocks, METH_VARARGS, "copy($module, source, source_blocks, target, target_blocks, /)\n--\n\n"},
    {"send", send_blocks, METH_VARARGS, "send($module, sock, header, pool, blocks, deadline, /)\n--\n\n"},
    {"receive", receive_blocks, METH_VARARGS, "receive($module, sock, header, pool, blocks, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_block_moves",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__block_moves(void)
{
    return PyModuleDef_Init(&definition);
}
