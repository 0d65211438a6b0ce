/* What is due when: events in the order of their times, and of their making where these are equal. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

/* Both halves as one number, which is compared without a branch: bits of times from 0 on are in their order.
 */
static unsigned __int128 rank(const struct due *due) {
    uint64_t bits;
    memcpy(&bits, &due->t_ns, sizeof(bits));
    return (unsigned __int128)bits << 64 | due->order;
}

static void put(struct heap *heap, int64_t place, const struct due *due) {
    heap->dues[place] = *due;
    if (heap->places)
        heap->places[due->version] = (int32_t)place;
}

/* Puts `due` at `place`, which is free, or above. */
static void rise(struct heap *heap, int64_t place, const struct due *due) {
    unsigned __int128 key = rank(due);
    for (; place > 0 && key < rank(&heap->dues[(place - 1) / 4]); place = (place - 1) / 4)
        put(heap, place, &heap->dues[(place - 1) / 4]);
    put(heap, place, due);
}

/* Puts `due` at `place`, which is free, or below. */
static void sink(struct heap *heap, int64_t place, const struct due *due) {
    unsigned __int128 key = rank(due);
    for (;;) {
        int64_t child = 4 * place + 1, end = child + 4, least = child;
        unsigned __int128 smallest;
        if (child >= heap->count)
            break;
        if (end > heap->count)
            end = heap->count;
        smallest = rank(&heap->dues[child]);
        for (child++; child < end; child++) {
            unsigned __int128 other = rank(&heap->dues[child]);
            least = other < smallest ? child : least;
            smallest = other < smallest ? other : smallest;
        }
        if (key <= smallest)
            break;
        put(heap, place, &heap->dues[least]);
        place = least;
    }
    put(heap, place, due);
}

void at(struct engine *e, double t_ns, int32_t what, int32_t id, uint32_t version) {
    struct heap *heap = &e->dues;
    struct due due = {t_ns, e->order++, what, id, version};
    if (t_ns >= e->in->end_ns)
        return;
    if (heap->taken) {
        heap->taken = 0;
        sink(heap, 0, &due);
        return;
    }
    if (heap->count == heap->capacity) {
        heap->capacity = heap->capacity ? 2 * heap->capacity : 4096;
        heap->dues = realloc(heap->dues, (size_t)heap->capacity * sizeof(*heap->dues));
        if (!heap->dues)
            abort();
    }
    rise(heap, heap->count++, &due);
}

/* Of what is foreseen of a flow or a link, by DUE_FLOW or DUE_QUEUE. */
static uint32_t foreseen_of(const struct engine *e, int32_t what, int32_t id) {
    return (uint32_t)(what == DUE_FLOW ? id : e->in->flows_count + id);
}

void foresee(struct engine *e, double t_ns, int32_t what, int32_t id) {
    struct heap *heap = &e->foreseen;
    struct due due = {t_ns, e->order++, what, id, foreseen_of(e, what, id)};
    int64_t place = heap->places[due.version];
    if (t_ns >= e->in->end_ns)
        forget(e, what, id);
    else if (place == NONE)
        rise(heap, heap->count++, &due);
    else if (rank(&due) < rank(&heap->dues[place]))
        rise(heap, place, &due);
    else
        sink(heap, place, &due);
}

static void take_out(struct heap *heap, int64_t place) {
    struct due last = heap->dues[--heap->count];
    if (place == heap->count)
        return;
    if (rank(&last) < rank(&heap->dues[place]))
        rise(heap, place, &last);
    else
        sink(heap, place, &last);
}

void forget(struct engine *e, int32_t what, int32_t id) {
    int32_t *place = &e->foreseen.places[foreseen_of(e, what, id)];
    int64_t free = *place;
    if (free == NONE)
        return;
    *place = NONE;
    take_out(&e->foreseen, free);
}

static void close_up(struct heap *heap) {
    if (heap->taken)
        take_out(heap, 0);
    heap->taken = 0;
}

double next_ns(struct engine *e) {
    double due;
    close_up(&e->dues);
    due = e->dues.count ? e->dues.dues[0].t_ns : NEVER;
    return e->foreseen.count && e->foreseen.dues[0].t_ns < due ? e->foreseen.dues[0].t_ns : due;
}

struct due next_due(struct engine *e) {
    struct due due;
    close_up(&e->dues);
    if (e->foreseen.count && (!e->dues.count || rank(&e->foreseen.dues[0]) < rank(&e->dues.dues[0]))) {
        due = e->foreseen.dues[0];
        e->foreseen.places[due.version] = NONE;
        take_out(&e->foreseen, 0);
    } else {
        due = e->dues.dues[0];
        e->dues.taken = 1;
    }
    return due;
}
