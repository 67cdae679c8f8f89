/* The C twin of the hashing in prefix_hash.py: a run of blocks, or one block of each of many sequences, per call.

   SHA-256 as in FIPS 180-4; on x86-64 by the processor's own instructions where it has them. The GIL is held: a
   prompt of 32,768 tokens takes a fraction of a millisecond. Tokens are hashed as they lie in memory, which is
   little-endian here, or this file does not compile and Python does the hashing. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if PY_BIG_ENDIAN
#error "tokens are hashed as little-endian int32"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_SHA_INSTRUCTIONS 1
#include <cpuid.h>
#include <immintrin.h>
#endif

#ifndef SOURCE_HASH
#define SOURCE_HASH ""
#endif

enum { DIGEST_SIZE = 32, CHUNK_SIZE = 64 };

static const uint32_t ROUND_CONSTANTS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static const uint32_t INITIAL_STATE[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

/* Takes `count` chunks of 64 bytes into the state. */
typedef void (*Compress)(uint32_t state[8], const uint8_t *data, size_t count);

/* ---- SHA-256 ---- */

static uint32_t rotated(uint32_t value, int by)
{
    return value >> by | value << (32 - by);
}

/* SHA-256 counts in big-endian words. */
static uint32_t swapped(uint32_t value)
{
    return value >> 24 | (value >> 8 & 0xff00) | (value << 8 & 0xff0000) | value << 24;
}

static void compress_portably(uint32_t state[8], const uint8_t *data, size_t count)
{
    for (; count; count--, data += CHUNK_SIZE) {
        uint32_t words[64];
        memcpy(words, data, CHUNK_SIZE);
        for (int i = 0; i < 16; i++)
            words[i] = swapped(words[i]);
        for (int i = 16; i < 64; i++) {
            uint32_t far = words[i - 15], near = words[i - 2];
            words[i] = words[i - 16] + (rotated(far, 7) ^ rotated(far, 18) ^ far >> 3) + words[i - 7] +
                       (rotated(near, 17) ^ rotated(near, 19) ^ near >> 10);
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int i = 0; i < 64; i++) {
            uint32_t first = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + (g ^ (e & (f ^ g))) +
                             ROUND_CONSTANTS[i] + words[i];
            uint32_t second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) | (c & (a | b)));
            h = g, g = f, f = e, e = d + first;
            d = c, c = b, b = a, a = first + second;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#ifdef HAS_SHA_INSTRUCTIONS
/* The instructions want the state as (A, B, E, F) and (C, D, G, H), and do two rounds each. */
__attribute__((target("sha,sse4.1"))) static void compress_by_instructions(uint32_t state[8], const uint8_t *data,
                                                                           size_t count)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);

    for (; count; count--, data += CHUNK_SIZE) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i words[4]; /* The latest 16, four each. */
        for (int i = 0; i < 4; i++)
            words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), swap);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const __m128i last = words[(i + 3) & 3];
            if (i >= 4) {
                __m128i sum = _mm_sha256msg1_epu32(words[i & 3], words[(i + 1) & 3]);
                sum = _mm_add_epi32(sum, _mm_alignr_epi8(last, words[(i + 2) & 3], 4));
                words[i & 3] = _mm_sha256msg2_epu32(sum, last);
            }
            const __m128i constants = _mm_loadu_si128((const __m128i *)(ROUND_CONSTANTS + 4 * i));
            const __m128i added = _mm_add_epi32(words[i & 3], constants);
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }

    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#endif

static Compress best_compress(void)
{
#ifdef HAS_SHA_INSTRUCTIONS
    unsigned int a, b, c, d;
    int has_sse41 = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_1);
    int has_sha = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
    if (has_sse41 && has_sha)
        return compress_by_instructions;
#endif
    return compress_portably;
}

/* A message of a fixed size, with its padding, in whole chunks: many of one size are hashed in its place. */
typedef struct {
    uint8_t *bytes;
    size_t num_chunks;
} Message;

/* Raises MemoryError. The caller frees `bytes`. */
static int message_begin(Message *message, size_t size)
{
    message->num_chunks = (size + 1 + sizeof(uint64_t) + CHUNK_SIZE - 1) / CHUNK_SIZE;
    size_t padded_size = message->num_chunks * CHUNK_SIZE;
    message->bytes = PyMem_Calloc(padded_size, 1);
    if (!message->bytes) {
        PyErr_NoMemory();
        return -1;
    }
    uint64_t num_bits = (uint64_t)size * 8;
    const uint32_t length[2] = {swapped((uint32_t)(num_bits >> 32)), swapped((uint32_t)num_bits)};
    message->bytes[size] = 0x80;
    memcpy(message->bytes + padded_size - sizeof length, length, sizeof length);
    return 0;
}

/* A new bytes object. */
static PyObject *digest_of(const Message *message, Compress compress)
{
    uint32_t state[8];
    memcpy(state, INITIAL_STATE, sizeof state);
    compress(state, message->bytes, message->num_chunks);
    for (int i = 0; i < 8; i++)
        state[i] = swapped(state[i]);
    return PyBytes_FromStringAndSize((const char *)state, DIGEST_SIZE);
}

/* ---- blocks ---- */

/* SHA-256(parent, row) as a new bytes object; `message` is as long as both. */
static PyObject *hash_row(const Message *message, Compress compress, PyObject *parent, const uint8_t *row,
                          size_t row_size)
{
    if (!PyBytes_Check(parent) || PyBytes_GET_SIZE(parent) != DIGEST_SIZE)
        return PyErr_Format(PyExc_ValueError, "a parent must be %d bytes", DIGEST_SIZE);
    memcpy(message->bytes, PyBytes_AS_STRING(parent), DIGEST_SIZE);
    memcpy(message->bytes + DIGEST_SIZE, row, row_size);
    return digest_of(message, compress);
}

/* Fills `view`, which the caller releases, with a contiguous buffer of int32 of `num_dimensions`. */
static int get_tokens(PyObject *object, Py_buffer *view, int num_dimensions)
{
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return -1;
    if (view->itemsize != 4 || !view->format || !strchr("il", view->format[0]) || view->ndim != num_dimensions) {
        PyErr_Format(PyExc_TypeError, "tokens must be int32 in %d dimension(s)", num_dimensions);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static Compress compress_of(PyObject *module)
{
    return *(Compress *)PyModule_GetState(module);
}

/* Hashes of rows that lie one after another, as a new list. Their parents stand in the list `parents`, or if that is NULL, each row
   follows the one before it, the first one `first_parent`. */
static PyObject *hash_all(Compress compress, const uint8_t *rows, Py_ssize_t num_rows, size_t row_size,
                          PyObject *parents, PyObject *first_parent)
{
    Message message;
    if (message_begin(&message, DIGEST_SIZE + row_size) < 0)
        return NULL;
    PyObject *hashes = PyList_New(num_rows), *parent = first_parent;
    /* Nothing from here on runs other code, which could change the list of parents. */
    if (hashes && parents && PyList_GET_SIZE(parents) != num_rows) {
        PyErr_Format(PyExc_ValueError, "%zd parents for %zd rows", PyList_GET_SIZE(parents), num_rows);
        Py_CLEAR(hashes);
    }
    for (Py_ssize_t i = 0; hashes && i < num_rows; i++) {
        if (parents)
            parent = PyList_GET_ITEM(parents, i);
        parent = hash_row(&message, compress, parent, rows + row_size * i, row_size);
        if (parent)
            PyList_SET_ITEM(hashes, i, parent); /* The list's from here on, and alive as long as it. */
        else
            Py_CLEAR(hashes);
    }
    PyMem_Free(message.bytes);
    return hashes;
}

static PyObject *hash_run(PyObject *module, PyObject *arguments)
{
    PyObject *parent, *token_ids;
    Py_ssize_t block_size;
    if (!PyArg_ParseTuple(arguments, "SOn:hash_run", &parent, &token_ids, &block_size))
        return NULL;
    if (block_size < 1 || block_size > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "block_size is %zd: it must be at least 1, and an int32", block_size);
    Py_buffer view;
    if (get_tokens(token_ids, &view, 1) < 0)
        return NULL;
    Py_ssize_t num_rows = view.shape[0] / block_size;
    PyObject *hashes = hash_all(compress_of(module), view.buf, num_rows, 4 * (size_t)block_size, NULL, parent);
    PyBuffer_Release(&view);
    return hashes;
}

static PyObject *hash_rows(PyObject *module, PyObject *arguments)
{
    PyObject *parents, *token_rows;
    if (!PyArg_ParseTuple(arguments, "O!O:hash_rows", &PyList_Type, &parents, &token_rows))
        return NULL;
    Py_buffer view;
    if (get_tokens(token_rows, &view, 2) < 0)
        return NULL;
    PyObject *hashes =
        hash_all(compress_of(module), view.buf, view.shape[0], 4 * (size_t)view.shape[1], parents, NULL);
    PyBuffer_Release(&view);
    return hashes;
}

static PyObject *sha256_of(Compress compress, PyObject *data)
{
    if (!PyBytes_Check(data))
        return PyErr_Format(PyExc_TypeError, "data must be bytes, not %s", Py_TYPE(data)->tp_name);
    Message message;
    size_t size = (size_t)PyBytes_GET_SIZE(data);
    if (message_begin(&message, size) < 0)
        return NULL;
    memcpy(message.bytes, PyBytes_AS_STRING(data), size);
    PyObject *digest = digest_of(&message, compress);
    PyMem_Free(message.bytes);
    return digest;
}

static PyObject *sha256(PyObject *module, PyObject *data)
{
    return sha256_of(compress_of(module), data);
}

static PyObject *sha256_portably(PyObject *Py_UNUSED(module), PyObject *data)
{
    return sha256_of(compress_portably, data);
}

/* ---- module ---- */

static int execute(PyObject *module)
{
    *(Compress *)PyModule_GetState(module) = best_compress();
    return PyModule_AddStringConstant(module, "SOURCE_HASH", SOURCE_HASH);
}

static PyMethodDef methods[] = {
    {"hash_run", hash_run, METH_VARARGS, "hash_run($module, parent, token_ids, block_size, /)\n--\n\n"},
    {"hash_rows", hash_rows, METH_VARARGS, "hash_rows($module, parents, token_rows, /)\n--\n\n"},
    {"sha256", sha256, METH_O, "sha256($module, data, /)\n--\n\n"},
    {"sha256_portably", sha256_portably, METH_O, "sha256_portably($module, data, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_prefix_hash",
    .m_size = sizeof(Compress),
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__prefix_hash(void)
{
    return PyModuleDef_Init(&definition);
}
