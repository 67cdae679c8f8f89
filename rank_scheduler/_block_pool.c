/* The C twin of block_pool.py: the same class, method for method. What the methods mean stands there.

   Blocks are int32 numbers, checked where they come in. The free list is doubly linked through two arrays, with the
   null block as its head and end: `next` of it is handed out first. The prefix cache is one hash table of block
   numbers, open addressed; a quarter of it is empty when every block is cached, so it never grows. Block arguments
   are buffers of int32 (rows of numpy arrays) or iterables of numbers. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#ifndef SOURCE_HASH
#define SOURCE_HASH ""
#endif

enum { NULL_BLOCK = 0, FEW_BLOCKS = 64, MAX_NUM_BLOCKS = 1 << 30 };

typedef struct {
    PyObject *block_removed; /* Classes of kv_events.py. */
    PyObject *all_blocks_cleared;
} ModuleState;

typedef struct {
    uint32_t hash; /* Of the bytes and the group. */
    int32_t block; /* The null block where the entry is empty: that one is never cached. */
} Entry;

enum { KEY_SIZE = 8 }; /* HASH_BYTES of prefix_chain.py */

typedef struct {
    char key[KEY_SIZE]; /* The hash's first bytes. */
    char is_findable;
} Change;

typedef struct {
    PyObject_HEAD
    Py_ssize_t num_blocks;
    Py_ssize_t num_groups;
    Py_ssize_t num_free;
    unsigned long long version;
    int32_t *ref_counts;
    int32_t *next; /* In the free list; of no meaning for blocks that somebody holds. */
    int32_t *previous;
    int32_t *groups;
    PyObject **hashes; /* Each NULL, or a bytes object that is owned. */
    Entry *entries;
    uint32_t entry_mask; /* Their number, a power of two, less one. */
    PyObject *events;    /* A list or NULL. */
    int records_changes;
    Py_ssize_t watched_group;
    Change *changes; /* In the order in which they came about. */
    Py_ssize_t num_changes, max_changes;
} Pool;

/* ---- blocks as arguments ---- */

/* Numbers that were checked and copied, as what they came from may change while other code runs. */
typedef struct {
    int32_t *items; /* `few`, or if they are many, a piece of memory of its own. */
    Py_ssize_t count;
    int32_t few[FEW_BLOCKS];
} Blocks;

static void blocks_release(Blocks *blocks)
{
    if (blocks->items != blocks->few)
        PyMem_Free(blocks->items);
}

static int blocks_reserve(Blocks *blocks, Py_ssize_t count)
{
    blocks->count = count;
    blocks->items = count > FEW_BLOCKS ? PyMem_New(int32_t, count) : blocks->few;
    if (blocks->items)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static int check_block(const Pool *pool, Py_ssize_t block)
{
    if (block >= 0 && block < pool->num_blocks)
        return 0;
    PyErr_Format(PyExc_ValueError, "there is no block %zd: they count from 0 to %zd", block, pool->num_blocks - 1);
    return -1;
}

/* The number of a block, or -1 with an exception. */
static Py_ssize_t block_from(const Pool *pool, PyObject *object)
{
    Py_ssize_t block = PyNumber_AsSsize_t(object, NULL);
    if (block == -1 && PyErr_Occurred())
        return -1;
    return check_block(pool, block) < 0 ? -1 : block;
}

/* Fills `view`, which the caller releases, with a buffer of int32 in one dimension. */
static int get_row(PyObject *object, Py_buffer *view, int flags)
{
    if (PyObject_GetBuffer(object, view, PyBUF_STRIDES | PyBUF_FORMAT | flags) < 0)
        return -1;
    if (view->itemsize == 4 && view->format && strchr("il", view->format[0]) && view->ndim == 1)
        return 0;
    PyErr_SetString(PyExc_TypeError, "a row of blocks must be int32 in one dimension");
    PyBuffer_Release(view);
    return -1;
}

static int blocks_from_buffer(Blocks *blocks, const Pool *pool, PyObject *object)
{
    Py_buffer view;
    if (get_row(object, &view, 0) < 0)
        return -1;
    int failed = blocks_reserve(blocks, view.shape[0]);
    for (Py_ssize_t i = 0; !failed && i < blocks->count; i++)
        memcpy(blocks->items + i, (char *)view.buf + i * view.strides[0], sizeof(int32_t));
    PyBuffer_Release(&view);
    for (Py_ssize_t i = 0; !failed && i < blocks->count; i++)
        if (check_block(pool, blocks->items[i]) < 0) {
            blocks_release(blocks);
            failed = -1;
        }
    return failed;
}

static int blocks_from_iterable(Blocks *blocks, const Pool *pool, PyObject *object)
{
    PyObject *numbers = PySequence_Tuple(object); /* Of our own: an `__index__` may run any code. */
    if (!numbers)
        return -1;
    int failed = blocks_reserve(blocks, PyTuple_GET_SIZE(numbers));
    for (Py_ssize_t i = 0; !failed && i < blocks->count; i++) {
        Py_ssize_t block = block_from(pool, PyTuple_GET_ITEM(numbers, i));
        blocks->items[i] = (int32_t)block;
        if (block < 0) {
            blocks_release(blocks);
            failed = -1;
        }
    }
    Py_DECREF(numbers);
    return failed;
}

/* On success the caller calls `blocks_release`; on failure there is nothing to release. */
static int blocks_get(Blocks *blocks, const Pool *pool, PyObject *object)
{
    if (!PyList_CheckExact(object) && PyObject_CheckBuffer(object))
        return blocks_from_buffer(blocks, pool, object);
    return blocks_from_iterable(blocks, pool, object);
}

static PyObject *list_of(const int32_t *items, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *item = PyLong_FromLong(items[i]);
        if (item)
            PyList_SET_ITEM(list, i, item);
        else
            Py_CLEAR(list);
    }
    return list;
}

/* ---- the free list ---- */

static void link_between(Pool *pool, int32_t block, int32_t before, int32_t after)
{
    pool->previous[block] = before;
    pool->next[block] = after;
    pool->next[before] = block;
    pool->previous[after] = block;
    pool->num_free++;
}

static void unlink_free(Pool *pool, int32_t block)
{
    int32_t before = pool->previous[block], after = pool->next[block];
    pool->next[before] = after;
    pool->previous[after] = before;
    pool->num_free--;
}

/* ---- hashes ---- */

static int check_group(const Pool *pool, Py_ssize_t group)
{
    if (group >= 0 && group < pool->num_groups)
        return 0;
    PyErr_Format(PyExc_ValueError, "there is no group %zd: they count from 0 to %zd", group, pool->num_groups - 1);
    return -1;
}

/* The number of a group, 0 if it was left out, or -1 with an exception. */
static Py_ssize_t group_from(const Pool *pool, PyObject *object)
{
    Py_ssize_t group = object ? PyNumber_AsSsize_t(object, NULL) : 0;
    if (group == -1 && PyErr_Occurred())
        return -1;
    return check_group(pool, group) < 0 ? -1 : group;
}

static int check_hash(PyObject *block_hash)
{
    if (PyBytes_CheckExact(block_hash))
        return 0;
    PyErr_Format(PyExc_TypeError, "a hash must be bytes, not %s", Py_TYPE(block_hash)->tp_name);
    return -1;
}

static uint32_t entry_hash(PyObject *block_hash, Py_ssize_t group)
{
    uint64_t hash = (uint64_t)PyObject_Hash(block_hash); /* Cannot fail: these are bytes. */
    return (uint32_t)(hash ^ hash >> 32) + (uint32_t)group * 0x9e3779b9u;
}

static int are_equal(PyObject *one, PyObject *other)
{
    Py_ssize_t size = PyBytes_GET_SIZE(one);
    return one == other || (size == PyBytes_GET_SIZE(other) &&
                            memcmp(PyBytes_AS_STRING(one), PyBytes_AS_STRING(other), (size_t)size) == 0);
}

/* The entry of the block that answers, or the empty one where it would stand. */
static uint32_t find_entry(const Pool *pool, PyObject *block_hash, Py_ssize_t group, uint32_t hash)
{
    uint32_t at = hash & pool->entry_mask;
    for (; pool->entries[at].block != NULL_BLOCK; at = (at + 1) & pool->entry_mask) {
        int32_t block = pool->entries[at].block;
        if (pool->entries[at].hash == hash && pool->groups[block] == group &&
            are_equal(pool->hashes[block], block_hash))
            break;
    }
    return at;
}

/* The block that answers for bytes, or the null block. */
static int32_t find_block(const Pool *pool, PyObject *block_hash, Py_ssize_t group)
{
    return pool->entries[find_entry(pool, block_hash, group, entry_hash(block_hash, group))].block;
}

/* Entries behind move up, so that none is cut off from the place where its search begins. */
static void empty_entry(Pool *pool, uint32_t at)
{
    const uint32_t mask = pool->entry_mask;
    for (uint32_t next = (at + 1) & mask; pool->entries[next].block != NULL_BLOCK; next = (next + 1) & mask) {
        uint32_t begin = pool->entries[next].hash & mask;
        if (((next - begin) & mask) >= ((next - at) & mask)) {
            pool->entries[at] = pool->entries[next];
            at = next;
        }
    }
    pool->entries[at].block = NULL_BLOCK;
}

static int append_event(const Pool *pool, PyObject *event)
{
    if (!event)
        return -1;
    int failed = PyList_Append(pool->events, event);
    Py_DECREF(event);
    return failed;
}

/* For `take_changes`. Fails only without memory. */
static int note_change(Pool *pool, PyObject *block_hash, Py_ssize_t group, int is_findable)
{
    if (!pool->records_changes || group != pool->watched_group)
        return 0;
    if (pool->num_changes == pool->max_changes) {
        Py_ssize_t count = pool->max_changes ? 2 * pool->max_changes : 64;
        Change *changes = PyMem_Realloc(pool->changes, sizeof(Change) * (size_t)count);
        if (!changes) {
            PyErr_NoMemory();
            return -1;
        }
        pool->changes = changes;
        pool->max_changes = count;
    }
    Change *change = pool->changes + pool->num_changes++;
    Py_ssize_t size = PyBytes_GET_SIZE(block_hash);
    memset(change->key, 0, KEY_SIZE);
    memcpy(change->key, PyBytes_AS_STRING(block_hash), (size_t)(size < KEY_SIZE ? size : KEY_SIZE));
    change->is_findable = (char)is_findable;
    return 0;
}

/* Fails only where it cannot be told. */
static int forget_block(Pool *pool, int32_t block)
{
    PyObject *block_hash = pool->hashes[block];
    if (!block_hash)
        return 0;
    Py_ssize_t group = pool->groups[block];
    empty_entry(pool, find_entry(pool, block_hash, group, entry_hash(block_hash, group)));
    /* The reference is ours from here on. */
    pool->hashes[block] = NULL;
    pool->groups[block] = 0;
    pool->version++;
    int failed = note_change(pool, block_hash, group, 0);
    if (!failed && pool->events) {
        ModuleState *state = PyType_GetModuleState(Py_TYPE(pool));
        failed = append_event(pool, PyObject_CallFunction(state->block_removed, "On", block_hash, group));
    }
    Py_DECREF(block_hash);
    return failed;
}

/* 1: the block answers now; 0: another one does; -1: exception. `block` and `group` are valid numbers. */
static int cache_block(Pool *pool, int32_t block, PyObject *block_hash, Py_ssize_t group)
{
    if (check_hash(block_hash) < 0)
        return -1;
    if (block == NULL_BLOCK || pool->hashes[block]) {
        PyErr_Format(PyExc_ValueError, "block %d is the null block, or cached already", block);
        return -1;
    }
    uint32_t hash = entry_hash(block_hash, group);
    Entry *entry = pool->entries + find_entry(pool, block_hash, group, hash);
    if (entry->block != NULL_BLOCK)
        return 0;
    *entry = (Entry){hash, block};
    Py_INCREF(block_hash);
    pool->hashes[block] = block_hash;
    pool->groups[block] = (int32_t)group;
    pool->version++;
    return note_change(pool, block_hash, group, 1) < 0 ? -1 : 1;
}

/* ---- taking and releasing ---- */

/* That `count` blocks can be allocated, beside `num_others` free ones. */
static int check_free(const Pool *pool, Py_ssize_t count, Py_ssize_t num_others)
{
    if (count >= 0 && count <= pool->num_free - num_others)
        return 0;
    PyErr_Format(PyExc_ValueError, "%zd blocks asked for, %zd are free", count, pool->num_free - num_others);
    return -1;
}

/* So many are free. */
static int allocate_into(Pool *pool, int32_t *items, Py_ssize_t count)
{
    pool->version++;
    for (Py_ssize_t i = 0; i < count; i++) {
        int32_t block = pool->next[NULL_BLOCK];
        if (forget_block(pool, block) < 0)
            return -1;
        unlink_free(pool, block);
        pool->ref_counts[block] = 1;
        items[i] = block;
    }
    return 0;
}

static int check_no_null(const Blocks *blocks)
{
    for (Py_ssize_t i = 0; i < blocks->count; i++)
        if (blocks->items[i] == NULL_BLOCK) {
            PyErr_SetString(PyExc_ValueError, "the null block cannot be held");
            return -1;
        }
    return 0;
}

static void touch_blocks(Pool *pool, const Blocks *blocks)
{
    for (Py_ssize_t i = 0; i < blocks->count; i++)
        if (!pool->ref_counts[blocks->items[i]]++)
            unlink_free(pool, blocks->items[i]);
}

static int release_blocks(Pool *pool, const Blocks *blocks)
{
    for (Py_ssize_t i = blocks->count - 1; i >= 0; i--) {
        int32_t block = blocks->items[i];
        if (block == NULL_BLOCK)
            continue;
        if (!pool->ref_counts[block]) {
            PyErr_Format(PyExc_ValueError, "block %d is released, and nobody holds it", block);
            return -1;
        }
        if (--pool->ref_counts[block])
            continue;
        if (pool->hashes[block])
            link_between(pool, block, pool->previous[NULL_BLOCK], NULL_BLOCK);
        else
            link_between(pool, block, NULL_BLOCK, pool->next[NULL_BLOCK]);
    }
    return 0;
}

static Py_ssize_t count_with_references(const Pool *pool, const Blocks *blocks, int32_t references)
{
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < blocks->count; i++)
        count += blocks->items[i] != NULL_BLOCK && pool->ref_counts[blocks->items[i]] == references;
    return count;
}

/* ---- methods ---- */

static PyObject *Pool_allocate(Pool *pool, PyObject *argument)
{
    Py_ssize_t count = PyNumber_AsSsize_t(argument, NULL);
    if ((count == -1 && PyErr_Occurred()) || check_free(pool, count, 0) < 0)
        return NULL;
    Blocks blocks;
    if (blocks_reserve(&blocks, count) < 0)
        return NULL;
    PyObject *list = allocate_into(pool, blocks.items, count) < 0 ? NULL : list_of(blocks.items, count);
    blocks_release(&blocks);
    return list;
}

static int take_into(Pool *pool, const Blocks *held, int32_t *row, Py_ssize_t num_columns)
{
    Py_ssize_t num_new = num_columns - held->count;
    if (check_no_null(held) < 0 || check_free(pool, num_new, count_with_references(pool, held, 0)) < 0)
        return -1;
    touch_blocks(pool, held);
    memcpy(row, held->items, sizeof(int32_t) * (size_t)held->count);
    return allocate_into(pool, row + held->count, num_new);
}

static PyObject *Pool_take(Pool *pool, PyObject *const *arguments, Py_ssize_t num_arguments)
{
    if (num_arguments != 2)
        return PyErr_Format(PyExc_TypeError, "take() takes 2 arguments, not %zd", num_arguments);
    Blocks held;
    if (blocks_get(&held, pool, arguments[0]) < 0)
        return NULL;
    Py_buffer row;
    int failed = get_row(arguments[1], &row, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
    if (!failed) {
        failed = take_into(pool, &held, row.buf, row.shape[0]);
        PyBuffer_Release(&row);
    }
    blocks_release(&held);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Pool_touch(Pool *pool, PyObject *argument)
{
    Blocks blocks;
    if (blocks_get(&blocks, pool, argument) < 0)
        return NULL;
    int failed = check_no_null(&blocks);
    if (!failed)
        touch_blocks(pool, &blocks);
    blocks_release(&blocks);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Pool_release(Pool *pool, PyObject *argument)
{
    Blocks blocks;
    if (blocks_get(&blocks, pool, argument) < 0)
        return NULL;
    int failed = release_blocks(pool, &blocks);
    blocks_release(&blocks);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Pool_cache(Pool *pool, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"", "", "group", NULL};
    PyObject *number, *block_hash, *group_number = NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO|O:cache", names, &number, &block_hash, &group_number))
        return NULL;
    Py_ssize_t block = block_from(pool, number);
    if (block < 0)
        return NULL;
    Py_ssize_t group = group_from(pool, group_number);
    if (group < 0)
        return NULL;
    int cached = cache_block(pool, (int32_t)block, block_hash, group);
    return cached < 0 ? NULL : PyBool_FromLong(cached);
}

/* Caches each pair; `blocks` are those that answer afterwards. `hashes` is a list or tuple. */
static int cache_each(Pool *pool, Blocks *blocks, PyObject *hashes, Py_ssize_t group)
{
    if (PySequence_Fast_GET_SIZE(hashes) != blocks->count) {
        PyErr_Format(PyExc_ValueError, "%zd blocks for %zd hashes", blocks->count, PySequence_Fast_GET_SIZE(hashes));
        return -1;
    }
    Py_ssize_t num_answering = 0;
    for (Py_ssize_t i = 0; i < blocks->count; i++) {
        int cached = cache_block(pool, blocks->items[i], PySequence_Fast_GET_ITEM(hashes, i), group);
        if (cached < 0)
            return -1;
        if (cached)
            blocks->items[num_answering++] = blocks->items[i];
    }
    blocks->count = num_answering;
    return 0;
}

static PyObject *Pool_cache_all(Pool *pool, PyObject *const *arguments, Py_ssize_t num_arguments)
{
    if (num_arguments != 2 && num_arguments != 3)
        return PyErr_Format(PyExc_TypeError, "cache_all() takes 2 or 3 arguments, not %zd", num_arguments);
    Py_ssize_t group = group_from(pool, num_arguments == 3 ? arguments[2] : NULL);
    if (group < 0)
        return NULL;
    PyObject *hashes = PySequence_Fast(arguments[1], "hashes must be a sequence");
    if (!hashes)
        return NULL;
    PyObject *answering = NULL;
    Blocks blocks;
    if (blocks_get(&blocks, pool, arguments[0]) == 0) {
        if (cache_each(pool, &blocks, hashes, group) == 0)
            answering = list_of(blocks.items, blocks.count);
        blocks_release(&blocks);
    }
    Py_DECREF(hashes);
    return answering;
}

static PyObject *Pool_is_cached(Pool *pool, PyObject *argument)
{
    Py_ssize_t block = block_from(pool, argument);
    return block < 0 ? NULL : PyBool_FromLong(pool->hashes[block] != NULL);
}

static PyObject *Pool_forget(Pool *pool, PyObject *argument)
{
    Py_ssize_t block = block_from(pool, argument);
    if (block < 0 || forget_block(pool, (int32_t)block) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Pool_clear_all(Pool *pool, PyObject *Py_UNUSED(unused))
{
    if (pool->num_free != pool->num_blocks - 1)
        Py_RETURN_FALSE;
    for (Py_ssize_t block = 0; block < pool->num_blocks; block++)
        if (pool->hashes[block] && note_change(pool, pool->hashes[block], pool->groups[block], 0) < 0)
            return NULL;
    memset(pool->entries, 0, sizeof(Entry) * ((size_t)pool->entry_mask + 1));
    for (Py_ssize_t block = 0; block < pool->num_blocks; block++) {
        Py_CLEAR(pool->hashes[block]);
        pool->groups[block] = 0;
    }
    pool->version++;
    if (pool->events) {
        ModuleState *state = PyType_GetModuleState(Py_TYPE(pool));
        if (append_event(pool, PyObject_CallNoArgs(state->all_blocks_cleared)) < 0)
            return NULL;
    }
    Py_RETURN_TRUE;
}

static PyObject *Pool_find(Pool *pool, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"", "group", NULL};
    PyObject *block_hash, *group_number = NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|O:find", names, &block_hash, &group_number))
        return NULL;
    Py_ssize_t group = group_from(pool, group_number);
    if (group < 0 || check_hash(block_hash) < 0)
        return NULL;
    int32_t block = find_block(pool, block_hash, group);
    if (block == NULL_BLOCK)
        Py_RETURN_NONE;
    return PyLong_FromLong(block);
}

/* A new list of the blocks of the longest cached run. `hashes` is a list or tuple. */
static PyObject *look_up(const Pool *pool, PyObject *hashes, Py_ssize_t group)
{
    Blocks blocks;
    Py_ssize_t num_hashes = PySequence_Fast_GET_SIZE(hashes), num_found = 0;
    if (blocks_reserve(&blocks, num_hashes) < 0)
        return NULL;
    for (; num_found < num_hashes; num_found++) {
        PyObject *block_hash = PySequence_Fast_GET_ITEM(hashes, num_found);
        if (check_hash(block_hash) < 0) {
            blocks_release(&blocks);
            return NULL;
        }
        int32_t block = find_block(pool, block_hash, group);
        if (block == NULL_BLOCK)
            break;
        blocks.items[num_found] = block;
    }
    PyObject *list = list_of(blocks.items, num_found);
    blocks_release(&blocks);
    return list;
}

static PyObject *Pool_lookup(Pool *pool, PyObject *const *arguments, Py_ssize_t num_arguments)
{
    if (num_arguments != 1 && num_arguments != 2)
        return PyErr_Format(PyExc_TypeError, "lookup() takes 1 or 2 arguments, not %zd", num_arguments);
    Py_ssize_t group = group_from(pool, num_arguments == 2 ? arguments[1] : NULL);
    if (group < 0)
        return NULL;
    PyObject *hashes = PySequence_Fast(arguments[0], "hashes must be a sequence");
    if (!hashes)
        return NULL;
    PyObject *blocks = look_up(pool, hashes, group);
    Py_DECREF(hashes);
    return blocks;
}

static PyObject *Pool_findable(Pool *pool, PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t block = 0; list && block < pool->num_blocks; block++)
        if (pool->hashes[block] && pool->groups[block] == pool->watched_group &&
            PyList_Append(list, pool->hashes[block]) < 0)
            Py_CLEAR(list);
    return list;
}

/* Writes the latest word on each key to `keys`: from the front those that are findable, from the back the others.
   Returns how many are findable, and `*num_removed`. `table` is all zero, its size `mask` + 1 more than the changes. */
static Py_ssize_t latest_changes(const Pool *pool, char *keys, uint32_t *table, uint32_t mask, Py_ssize_t *num_removed)
{
    Py_ssize_t num_stored = 0;
    *num_removed = 0;
    for (Py_ssize_t i = pool->num_changes - 1; i >= 0; i--) {
        const Change *change = pool->changes + i;
        uint64_t key;
        memcpy(&key, change->key, KEY_SIZE);
        uint32_t at = (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32) & mask;
        while (table[at] && memcmp(pool->changes[table[at] - 1].key, change->key, KEY_SIZE) != 0)
            at = (at + 1) & mask;
        if (table[at])
            continue; /* A later word is known. */
        table[at] = (uint32_t)i + 1;
        Py_ssize_t place = change->is_findable ? num_stored++ : pool->num_changes - ++*num_removed;
        memcpy(keys + KEY_SIZE * place, change->key, KEY_SIZE);
    }
    return num_stored;
}

static PyObject *Pool_take_changes(Pool *pool, PyObject *Py_UNUSED(unused))
{
    size_t count = (size_t)pool->num_changes, num_entries = 16;
    if (!count)
        return Py_BuildValue("(y#y#)", "", (Py_ssize_t)0, "", (Py_ssize_t)0);
    while (num_entries < 2 * count)
        num_entries *= 2;
    char *keys = PyMem_Malloc(KEY_SIZE * count);
    uint32_t *table = PyMem_Calloc(num_entries, sizeof(uint32_t));
    PyObject *changes = NULL;
    if (keys && table) {
        uint32_t mask = (uint32_t)(num_entries - 1);
        Py_ssize_t num_removed, num_stored = latest_changes(pool, keys, table, mask, &num_removed);
        const char *removed = keys + KEY_SIZE * (pool->num_changes - num_removed);
        changes = Py_BuildValue("(y#y#)", keys, KEY_SIZE * num_stored, removed, KEY_SIZE * num_removed);
        if (changes)
            pool->num_changes = 0;
    } else {
        PyErr_NoMemory();
    }
    PyMem_Free(keys);
    PyMem_Free(table);
    return changes;
}

static PyObject *count_blocks(Pool *pool, PyObject *argument, int32_t references)
{
    Blocks blocks;
    if (blocks_get(&blocks, pool, argument) < 0)
        return NULL;
    Py_ssize_t count = count_with_references(pool, &blocks, references);
    blocks_release(&blocks);
    return PyLong_FromSsize_t(count);
}

static PyObject *Pool_num_unheld(Pool *pool, PyObject *argument)
{
    return count_blocks(pool, argument, 0);
}

static PyObject *Pool_num_sole_references(Pool *pool, PyObject *argument)
{
    return count_blocks(pool, argument, 1);
}

static PyObject *Pool_num_references(Pool *pool, PyObject *argument)
{
    Py_ssize_t block = block_from(pool, argument);
    return block < 0 ? NULL : PyLong_FromLong(pool->ref_counts[block]);
}

static PyObject *Pool_free_blocks(Pool *pool, PyObject *Py_UNUSED(unused))
{
    Blocks blocks;
    if (blocks_reserve(&blocks, pool->num_free) < 0)
        return NULL;
    int32_t block = NULL_BLOCK;
    for (Py_ssize_t i = 0; i < blocks.count; i++)
        blocks.items[i] = block = pool->next[block];
    PyObject *list = list_of(blocks.items, blocks.count);
    blocks_release(&blocks);
    return list;
}

/* ---- integrity ---- */

static int violated(const char *what)
{
    PyErr_SetString(PyExc_AssertionError, what);
    return -1;
}

static int check_references(const Pool *pool, const Blocks *held)
{
    int32_t *expected = PyMem_Calloc((size_t)pool->num_blocks, sizeof *expected);
    if (!expected) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < held->count; i++)
        expected[held->items[i]]++;
    expected[NULL_BLOCK] = 0;
    Py_ssize_t block = 0;
    while (block < pool->num_blocks && expected[block] == pool->ref_counts[block])
        block++;
    if (block < pool->num_blocks)
        PyErr_Format(PyExc_AssertionError, "reference counts differ from holders: block %zd has %d, and %d holders",
                     block, pool->ref_counts[block], expected[block]);
    PyMem_Free(expected);
    return block < pool->num_blocks ? -1 : 0;
}

static int check_free_list(const Pool *pool)
{
    Py_ssize_t num_unheld = 0, num_listed = 0;
    for (Py_ssize_t block = 1; block < pool->num_blocks; block++)
        num_unheld += !pool->ref_counts[block];
    for (int32_t block = pool->next[NULL_BLOCK]; block != NULL_BLOCK; block = pool->next[block]) {
        if (pool->ref_counts[block] || pool->next[pool->previous[block]] != block || ++num_listed > num_unheld)
            return violated("free list differs from blocks without holder");
    }
    if (num_listed != num_unheld || num_listed != pool->num_free)
        return violated("free list differs from blocks without holder");
    return 0;
}

static int check_hashes(const Pool *pool)
{
    Py_ssize_t num_carried = 0, num_entries = 0;
    for (int32_t block = 0; block < pool->num_blocks; block++) {
        num_carried += pool->hashes[block] != NULL;
        if (pool->hashes[block] && find_block(pool, pool->hashes[block], pool->groups[block]) != block)
            return violated("prefix map differs from the blocks' hashes");
    }
    for (uint32_t at = 0; at <= pool->entry_mask; at++)
        num_entries += pool->entries[at].block != NULL_BLOCK;
    return num_entries == num_carried ? 0 : violated("prefix map differs from the blocks' hashes");
}

static PyObject *Pool_check_integrity(Pool *pool, PyObject *argument)
{
    Blocks held;
    if (blocks_get(&held, pool, argument) < 0)
        return NULL;
    int failed = check_references(pool, &held) < 0 || check_free_list(pool) < 0 || check_hashes(pool) < 0;
    blocks_release(&held);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- life ---- */

static int allocate_arrays(Pool *pool)
{
    size_t count = (size_t)pool->num_blocks, num_entries = 4;
    while (num_entries < count + count / 3)
        num_entries *= 2;
    pool->entry_mask = (uint32_t)(num_entries - 1);
    pool->ref_counts = PyMem_Calloc(count, sizeof(int32_t));
    pool->next = PyMem_Calloc(count, sizeof(int32_t));
    pool->previous = PyMem_Calloc(count, sizeof(int32_t));
    pool->groups = PyMem_Calloc(count, sizeof(int32_t));
    pool->hashes = PyMem_Calloc(count, sizeof(PyObject *));
    pool->entries = PyMem_Calloc(num_entries, sizeof(Entry));
    if (pool->ref_counts && pool->next && pool->previous && pool->groups && pool->hashes && pool->entries)
        return 0;
    PyErr_NoMemory();
    return -1;
}

/* Everything is set up here: there is no way to see a pool that is not, or to set one up twice. */
static PyObject *Pool_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"num_blocks", "num_groups", "events", "records_changes", "watched_group", NULL};
    Py_ssize_t num_blocks, num_groups = 1, watched_group = 0;
    PyObject *events = Py_None;
    int records_changes = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n|n$Opn:BlockPool", names, &num_blocks, &num_groups, &events,
                                     &records_changes, &watched_group))
        return NULL;
    if (num_blocks < 2 || num_blocks > MAX_NUM_BLOCKS)
        return PyErr_Format(PyExc_ValueError,
                            "num_blocks is %zd: a pool needs the null block and at least one more, and at most %d",
                            num_blocks, MAX_NUM_BLOCKS);
    if (num_groups < 1 || num_groups > MAX_NUM_BLOCKS)
        return PyErr_Format(PyExc_ValueError, "num_groups is %zd: there must be one at least, and at most %d",
                            num_groups, MAX_NUM_BLOCKS);
    if (events != Py_None && !PyList_Check(events))
        return PyErr_Format(PyExc_TypeError, "events must be a list or None, not %s", Py_TYPE(events)->tp_name);
    Pool *pool = (Pool *)type->tp_alloc(type, 0);
    if (!pool)
        return NULL;
    pool->num_blocks = num_blocks;
    pool->num_groups = num_groups;
    pool->watched_group = watched_group;
    if (events != Py_None) {
        Py_INCREF(events);
        pool->events = events;
    }
    pool->records_changes = records_changes;
    if (check_group(pool, watched_group) < 0 || allocate_arrays(pool) < 0) {
        Py_DECREF(pool);
        return NULL;
    }
    for (int32_t block = 1; block < num_blocks; block++)
        link_between(pool, block, block - 1, NULL_BLOCK);
    return (PyObject *)pool;
}

/* The hashes are bytes: only the list can be part of a cycle. */
static int Pool_traverse(Pool *pool, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(pool));
    Py_VISIT(pool->events);
    return 0;
}

/* Breaking the cycle at the events leaves a pool that still works, should anything reach it. */
static int Pool_clear(Pool *pool)
{
    Py_CLEAR(pool->events);
    return 0;
}

static void Pool_dealloc(Pool *pool)
{
    PyTypeObject *type = Py_TYPE(pool);
    PyObject_GC_UnTrack(pool);
    Pool_clear(pool);
    for (Py_ssize_t block = 0; pool->hashes && block < pool->num_blocks; block++)
        Py_XDECREF(pool->hashes[block]);
    PyMem_Free(pool->entries);
    PyMem_Free(pool->ref_counts);
    PyMem_Free(pool->next);
    PyMem_Free(pool->previous);
    PyMem_Free(pool->groups);
    PyMem_Free(pool->hashes);
    PyMem_Free(pool->changes);
    type->tp_free(pool);
    Py_DECREF(type); /* An instance of a heap type holds it. */
}

static PyObject *Pool_num_usable_blocks(Pool *pool, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(pool->num_blocks - 1);
}

static PyMethodDef pool_methods[] = {
    {"allocate", (PyCFunction)Pool_allocate, METH_O, "allocate($self, count, /)\n--\n\n"},
    {"take", (PyCFunction)(void (*)(void))Pool_take, METH_FASTCALL, "take($self, held, row, /)\n--\n\n"},
    {"touch", (PyCFunction)Pool_touch, METH_O, "touch($self, blocks, /)\n--\n\n"},
    {"release", (PyCFunction)Pool_release, METH_O, "release($self, blocks, /)\n--\n\n"},
    {"cache", (PyCFunction)(void (*)(void))Pool_cache, METH_VARARGS | METH_KEYWORDS,
     "cache($self, block, block_hash, /, group=0)\n--\n\n"},
    {"cache_all", (PyCFunction)(void (*)(void))Pool_cache_all, METH_FASTCALL,
     "cache_all($self, blocks, hashes, group=0, /)\n--\n\n"},
    {"is_cached", (PyCFunction)Pool_is_cached, METH_O, "is_cached($self, block, /)\n--\n\n"},
    {"forget", (PyCFunction)Pool_forget, METH_O, "forget($self, block, /)\n--\n\n"},
    {"clear", (PyCFunction)Pool_clear_all, METH_NOARGS, "clear($self, /)\n--\n\n"},
    {"find", (PyCFunction)(void (*)(void))Pool_find, METH_VARARGS | METH_KEYWORDS,
     "find($self, block_hash, /, group=0)\n--\n\n"},
    {"lookup", (PyCFunction)(void (*)(void))Pool_lookup, METH_FASTCALL,
     "lookup($self, hashes, group=0, /)\n--\n\n"},
    {"take_changes", (PyCFunction)Pool_take_changes, METH_NOARGS, "take_changes($self, /)\n--\n\n"},
    {"findable", (PyCFunction)Pool_findable, METH_NOARGS, "findable($self, /)\n--\n\n"},
    {"num_unheld", (PyCFunction)Pool_num_unheld, METH_O, "num_unheld($self, blocks, /)\n--\n\n"},
    {"num_references", (PyCFunction)Pool_num_references, METH_O, "num_references($self, block, /)\n--\n\n"},
    {"num_sole_references", (PyCFunction)Pool_num_sole_references, METH_O,
     "num_sole_references($self, blocks, /)\n--\n\n"},
    {"free_blocks", (PyCFunction)Pool_free_blocks, METH_NOARGS, "free_blocks($self, /)\n--\n\n"},
    {"check_integrity", (PyCFunction)Pool_check_integrity, METH_O, "check_integrity($self, held, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef pool_members[] = {
    {"num_free_blocks", T_PYSSIZET, offsetof(Pool, num_free), READONLY, NULL},
    {"version", T_ULONGLONG, offsetof(Pool, version), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef pool_properties[] = {
    {"num_usable_blocks", (getter)Pool_num_usable_blocks, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "The C twin of rank_scheduler.block_pool.BlockPool."},
    {Py_tp_new, Pool_new},
    {Py_tp_dealloc, Pool_dealloc},
    {Py_tp_traverse, Pool_traverse},
    {Py_tp_clear, Pool_clear},
    {Py_tp_methods, pool_methods},
    {Py_tp_members, pool_members},
    {Py_tp_getset, pool_properties},
    {0, NULL},
};

static PyType_Spec pool_spec = {
    .name = "rank_scheduler._block_pool.BlockPool",
    .basicsize = sizeof(Pool),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pool_slots,
};

/* ---- module ---- */

static int execute(PyObject *module)
{
    ModuleState *state = PyModule_GetState(module);
    PyObject *events = PyImport_ImportModule("rank_scheduler.kv_events");
    if (!events)
        return -1;
    state->block_removed = PyObject_GetAttrString(events, "BlockRemoved");
    state->all_blocks_cleared = PyObject_GetAttrString(events, "AllBlocksCleared");
    Py_DECREF(events);
    if (!state->block_removed || !state->all_blocks_cleared)
        return -1;
    PyObject *type = PyType_FromModuleAndSpec(module, &pool_spec, NULL);
    if (!type)
        return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed ? failed : PyModule_AddStringConstant(module, "SOURCE_HASH", SOURCE_HASH);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    ModuleState *state = PyModule_GetState(module);
    Py_VISIT(state->block_removed);
    Py_VISIT(state->all_blocks_cleared);
    return 0;
}

static int module_clear(PyObject *module)
{
    ModuleState *state = PyModule_GetState(module);
    Py_CLEAR(state->block_removed);
    Py_CLEAR(state->all_blocks_cleared);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_block_pool",
    .m_size = sizeof(ModuleState),
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__block_pool(void)
{
    return PyModuleDef_Init(&definition);
}
