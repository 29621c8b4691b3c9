"""Fetching ahead: what is asked for comes, in any order, under any budget, whatever the store does; nothing is left behind."""

import dataclasses
import gc
import itertools
import multiprocessing
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import faulty_store as faults
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed import open_bundles
from processes import wait_until

from packer.format.errors import BayplanError, FormatError, UsageError
from plugin import (
    BundleReader,
    FileChanged,
    ImageRead,
    PrefetchPool,
    ReadCancelled,
    ReadError,
    ReadStalled,
    Sample,
    SampleRead,
)
from plugin.pieces import image_piece, record_piece
from plugin.prefetch_engine import REMEMBERED_KEYS
from plugin.prefetch_job import Job
from plugin.prefetch_queue import ReadQueue
from plugin.spans import Piece, single

THREAD_NAME = "bayplan-prefetch"
DEADLINE_SECONDS = 1.0
"""Far above any read of these tests that is not made to hang."""
may_fork = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


OTHERS = set()
"""Threads of streams that tests of other files left open."""


def pool_threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME and thread not in OTHERS]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Also after a test that did not close its pool."""
    OTHERS.update(pool_threads())
    yield
    faults.FaultyFileSystem.hanging.set()
    gc.collect()
    for thread in pool_threads():
        thread.join(60)
    assert pool_threads() == []


@pytest.fixture
def pool(corpus):
    with PrefetchPool(BundleReader(corpus.url), num_threads=4) as pool:
        yield pool


def samples(corpus):
    return [Sample(record=record, images=images) for record, images in zip(corpus.records, corpus.images, strict=True)]


def image_reads(corpus):
    """A request for every image, and its bytes."""
    return [(ImageRead(source=source, entry=entry), data) for source, entry, data in corpus.entries]


def test_everything_comes_as_asked_for(corpus, pool):
    packs = [corpus.rows[start : start + 7] for start in range(0, len(corpus.rows), 7)]
    found = []
    for number, pack in enumerate(packs):
        pool.submit(number, [SampleRead(row=row) for row in pack])
        if number >= 4:
            found += pool.get(number - 4)
    for number in range(max(0, len(packs) - 4), len(packs)):
        found += pool.get(number)
    assert found == samples(corpus)
    counters = pool.counters()
    assert counters["hits"] + counters["waits"] == len(packs)
    assert counters["bytes"] == sum(len(data) for _, _, data in corpus.entries)
    assert (counters["retries"], counters["errors"], counters["held_bytes"], counters["keys"]) == (0, 0, 0, 0)


def test_a_record_may_come_without_its_images(corpus, store):
    row, record, images = max(zip(corpus.rows, corpus.records, corpus.images, strict=True), key=lambda item: len(item[2]))
    with PrefetchPool(BundleReader(store.url)) as pool:
        assert pool.submit("x", [SampleRead(row=row, with_images=False)]).get() == [Sample(record=record, images=[])]
        assert len(store.reads) == 1
        both = [ImageRead(source=row.source, entry=record["images"][0]), SampleRead(row=row)]
        assert pool.submit("y", both).get() == [images[0], Sample(record=record, images=images)]
        assert pool.submit("z", []).get() == []


def test_one_read_brings_neighbouring_records_and_one_their_images(corpus, store):
    first = next(number for number, row in enumerate(corpus.rows) if row.source == "clipart")
    rows = corpus.rows[first : first + 5]
    with PrefetchPool(BundleReader(store.url)) as pool:
        assert pool.submit("x", [SampleRead(row=row) for row in rows]).get() == samples(corpus)[first : first + 5]
    assert len(store.reads) == 2


def test_what_is_there_twice_is_read_once_and_what_is_got_twice_is_equal(corpus, store):
    row, expected = corpus.rows[0], samples(corpus)[0]
    with PrefetchPool(BundleReader(store.url)) as pool:
        handles = [pool.submit("x", [SampleRead(row=row)]) for _ in range(3)]
        with pytest.raises(UsageError, match="key 'x': submitted before with other requests"):
            pool.submit("x", [])
        assert handles[0].get() == [expected]
        once = len(store.reads)
        assert once == 1 + bool(expected.images)
        assert (pool.counters()["held_bytes"], pool.counters()["keys"]) == (0, 0)
        assert handles[0].get() == handles[1].get() == pool.get("x") == [expected]
        assert len(store.reads) == 4 * once


def test_those_who_wait_for_a_key_at_once_share_its_read(corpus, store):
    row, expected = corpus.rows[0], samples(corpus)[0]
    may_go_on = hold_reads(store)
    with PrefetchPool(BundleReader(store.url)) as pool, ThreadPoolExecutor(4) as getters:
        pool.submit("x", [SampleRead(row=row, with_images=False)])
        waiting = [getters.submit(pool.get, "x") for _ in range(4)]
        wait_until(lambda: pool.counters()["waits"] == 4)
        may_go_on.set()
        assert [getter.result()[0].record for getter in waiting] == [expected.record] * 4
    assert len(store.reads) == 1


def test_keys_taken_long_ago_are_forgotten_but_their_handles_read_again(corpus, pool):
    (request, data), *_ = image_reads(corpus)
    first = pool.submit(0, [request])
    assert first.get() == [data]
    for number in range(1, REMEMBERED_KEYS + 1):
        assert pool.submit(number, [request]).get() == [data]
    with pytest.raises(UsageError, match="key 'never': not submitted in this process"):
        pool.get("never")
    with pytest.raises(UsageError, match="key 0: not submitted in this process, cancelled, or taken more than 256 keys ago"):
        pool.get(0)
    assert pool.get(REMEMBERED_KEYS) == first.get() == [data]


# --- what is in memory already ---


def in_memory(corpus):
    """A reader that finds every file of the corpus open and in memory; skips where the system cannot tell."""
    reader = BundleReader(corpus.url)
    for row in corpus.rows:
        reader.read_sample(row)
    request, _ = image_reads(corpus)[0]
    if reader.read_span_now(single(image_piece(request.source, request.entry))) is None:
        pytest.skip("this system does not tell what is in memory")
    return reader


def test_what_is_in_memory_needs_no_thread(corpus):
    with PrefetchPool(in_memory(corpus)) as pool:
        handles = [pool.submit(number, [SampleRead(row=row)]) for number, row in enumerate(corpus.rows[:50])]
        assert all(handle.is_done() for handle in handles)
        assert pool.counters()["held_bytes"] > 0
        assert [handle.get()[0] for handle in handles] == samples(corpus)[:50]
        assert (pool.counters()["hits"], pool.counters()["waits"], pool.counters()["held_bytes"]) == (50, 0, 0)
        assert pool_threads() == []


def test_what_is_in_memory_keeps_the_budget_and_its_turn(corpus):
    known = image_reads(corpus)[:40]
    largest = max(len(data) for _, data in known)
    with PrefetchPool(in_memory(corpus), num_threads=2, max_bytes=2 * largest) as pool:
        for key, (request, _) in enumerate(known):
            pool.submit(key, [request])
            assert pool.counters()["held_bytes"] <= 2 * largest
        assert [pool.get(key) for key in range(len(known))] == [[data] for _, data in known]


def test_a_small_read_in_memory_does_not_pass_one_that_the_budget_holds_back(corpus, monkeypatch):
    reader = in_memory(corpus)
    known = sorted(image_reads(corpus), key=lambda item: len(item[1]))
    (small, small_data), (held, held_data), (large, large_data) = known[0], known[-2], known[-1]
    read_now = reader.read_span_now
    monkeypatch.setattr(reader, "read_span_now", lambda span: None if span.num_bytes == len(large_data) else read_now(span))
    with PrefetchPool(reader, num_threads=1, max_bytes=len(held_data) + len(small_data) + 1) as pool:
        assert pool.submit("held", [held]).is_done()
        waiting = pool.submit("large", [large])
        assert not pool.submit("small", [small]).is_done()
        assert pool.get("held") == [held_data]
        assert waiting.get() == [large_data]
        assert pool.get("small") == [small_data]


def test_an_entry_that_no_call_takes_is_an_error_where_it_is_got(corpus):
    """Of a bundle that is open, too, where it is looked for in memory first."""
    request, data = image_reads(corpus)[0]
    with PrefetchPool(in_memory(corpus), num_threads=1) as pool:
        for key, wrong in enumerate([{"offset": 10**30}, {"offset": -1}, {"size": 1.5}, {"size": "9"}, {"bundle": "x\0.zip"}]):
            handle = pool.submit(key, [ImageRead(source=request.source, entry=request.entry | wrong)])
            with pytest.raises(BayplanError):
                handle.get()
        assert pool.submit("right", [request]).get() == [data]
        assert (pool.counters()["held_bytes"], pool.counters()["keys"]) == (0, 0)


def test_half_of_a_sample_may_be_in_memory(corpus, monkeypatch):
    """Of some reads nobody can say; the rest is not read twice for it."""
    reader = in_memory(corpus)
    chance, read_now = random.Random(5), reader.read_span_now

    def sometimes(span):
        return read_now(span) if chance.random() < 0.5 else None

    monkeypatch.setattr(reader, "read_span_now", sometimes)
    with PrefetchPool(reader, num_threads=2) as pool:
        for number, start in enumerate(range(0, len(corpus.rows), 7)):
            pool.submit(number, [SampleRead(row=row) for row in corpus.rows[start : start + 7]])
            assert pool.get(number) == samples(corpus)[start : start + 7]
        counters = pool.counters()
        assert (counters["held_bytes"], counters["keys"], counters["retries"]) == (0, 0, 0)
        planned = sum(len(reader.plan(pieces)) for pieces in pieces_of(reader, corpus, 7))
        assert counters["reads"] == planned


def pieces_of(reader, corpus, per_key):
    """What the samples of each key ask for: all records at once, then the images of each read."""
    for start in range(0, len(corpus.rows), per_key):
        rows, records = corpus.rows[start : start + per_key], corpus.records[start : start + per_key]
        lines = [record_piece(row, number) for number, row in enumerate(rows)]
        yield lines
        for span in reader.plan(lines):
            yield [
                image_piece(rows[piece.slot].source, entry, (piece.slot, number))
                for piece in span.pieces
                for number, entry in enumerate(records[piece.slot]["images"])
            ]


def test_a_record_in_memory_that_is_another_is_refused_where_it_is_got(corpus):
    row = dataclasses.replace(corpus.rows[0], id_hash=corpus.rows[0].id_hash ^ 1)
    with PrefetchPool(in_memory(corpus), num_threads=1) as pool:
        handle = pool.submit("x", [SampleRead(row=row)])
        with pytest.raises(FileChanged, match="expected the record that was indexed"):
            handle.get()


@pytest.mark.parametrize("change", [{"offset": 1 << 63}, {"offset": 0.5}, {"size": 1.5}, {"bundle": ["x"]}])
def test_an_entry_that_no_file_can_have_is_refused_where_it_is_got(corpus, change):
    source, entry, _ = corpus.entries[0]
    with PrefetchPool(in_memory(corpus), num_threads=1) as pool:
        handle = pool.submit("x", [ImageRead(source=source, entry=entry | change)])
        with pytest.raises(ReadError):
            handle.get()
        assert pool.counters()["held_bytes"] == 0


@pytest.mark.parametrize("number", range(2))
def test_an_interrupt_while_it_is_asked_for_leaves_nobody_waiting(corpus, monkeypatch, number):
    reader = in_memory(corpus)
    rows, calls, read_now = corpus.rows[:7], itertools.count(), reader.read_span_now

    def interrupted(span):
        if next(calls) == number:
            raise KeyboardInterrupt
        return read_now(span)

    monkeypatch.setattr(reader, "read_span_now", interrupted)
    with PrefetchPool(reader, num_threads=1) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.submit("x", [SampleRead(row=row) for row in rows])
        assert (pool.counters()["held_bytes"], pool.counters()["keys"]) == (0, 0)
        assert pool.submit("x", [SampleRead(row=row) for row in rows]).get() == samples(corpus)[:7]


# --- the byte budget ---


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2_000, 40_000, 1 << 20]),
    st.lists(st.lists(st.integers(0, 400), max_size=4), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_any_key_can_be_got_in_any_order_under_any_budget(corpus, num_threads, max_bytes, keys, chance):
    known = image_reads(corpus)
    with PrefetchPool(BundleReader(corpus.url), num_threads=num_threads, max_bytes=max_bytes) as pool:
        for key, numbers in enumerate(keys):
            pool.submit(key, [known[number][0] for number in numbers])
        order = list(range(len(keys)))
        chance.shuffle(order)
        for key in order:
            assert pool.get(key) == [known[number][1] for number in keys[key]]
        assert pool.counters()["held_bytes"] == 0


def test_a_submit_above_the_budget_waits_for_nobody_and_the_budget_holds(corpus, store):
    known = image_reads(corpus)[:40]
    largest = max(len(data) for _, data in known)
    budget = 3 * largest
    with PrefetchPool(BundleReader(store.url), num_threads=4, max_bytes=budget) as pool:
        for key, (request, _) in enumerate(known):
            pool.submit(key, [request])
        wait_until(lambda: pool.counters()["stalls"] > 0)
        assert pool.counters()["held_bytes"] <= budget
        assert pool.counters()["reads"] < len(known)
        for key, (_, data) in enumerate(known):
            assert pool.get(key) == [data]
            assert pool.counters()["held_bytes"] <= budget + largest


job_sizes = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=8)


@given(job_sizes, st.integers(1, 40), st.data())
def test_the_queue_keeps_the_budget_and_starves_nobody(sizes, max_bytes, data):
    """Every job's reads begin in the end, in order; above the budget only a read alone, or one that somebody waits for."""
    queue = ReadQueue(max_bytes)
    jobs = []
    for number, spans in enumerate(sizes):
        job = Job(number, ())
        job.add(single(Piece(("web", "a"), 0, size, None, 0)) for size in spans)
        queue.add(job)
        jobs.append(job)
    begun, held = [], []
    while len(queue):
        if data.draw(st.booleans()):
            queue.want(data.draw(st.sampled_from([job for job in jobs if job.tasks])))
        before = queue.held_bytes
        task = queue.next_task()
        if task is None:
            assert before > 0
            queue.held_bytes -= held.pop(0).num_bytes
            continue
        begun.append(task)
        held.append(task)
        assert task.job.is_wanted or before == 0 or before + task.num_bytes <= max_bytes
    assert sorted(task.job.key for task in begun) == sorted(
        job.key for job, spans in zip(jobs, sizes, strict=True) for _ in spans
    )
    patient = [task.job.key for task in begun if not task.job.is_wanted]
    assert patient == sorted(patient)


def test_what_is_kept_stays_in_the_budget_until_it_is_let_go(corpus, store):
    known = image_reads(corpus)[:6]
    with PrefetchPool(BundleReader(store.url), num_threads=1, max_bytes=1) as pool:
        for key, (request, _) in enumerate(known):
            pool.submit(key, [request])
        with pool.keeping():
            assert [pool.get(key) for key in (0, 1)] == [[data] for _, data in known[:2]]
            assert pool.counters()["held_bytes"] == sum(len(data) for _, data in known[:2])
            assert len(store.reads) == 2
        wait_until(lambda: pool.counters()["held_bytes"] == len(known[2][1]))
        assert [pool.get(key) for key in range(2, 6)] == [[data] for _, data in known[2:]]
        assert pool.counters()["held_bytes"] == 0


# --- errors, cancelling, closing ---


def test_a_refused_read_is_raised_where_it_is_got_and_may_be_tried_again(corpus, store):
    (request, data), (other, other_data), *_ = image_reads(corpus)
    with PrefetchPool(BundleReader(store.url)) as pool:
        store.always = staticmethod(faults.wrong)
        handle = pool.submit("bad", [request, other])
        wait_until(handle.is_done)
        with pytest.raises(FileChanged, match="read twice"):
            pool.get("bad")
        store.always = staticmethod(faults.right)
        assert pool.get("bad") == [data, other_data]
        counters = pool.counters()
        assert (counters["errors"], counters["held_bytes"]) == (1, 0)
        assert counters["retries"] >= 1


def test_an_entry_that_is_none_is_raised_where_it_is_got(corpus, pool):
    handle = pool.submit("x", [ImageRead(source="web", entry={"bundle": "a.zip"}, sample_id="a-17")])
    with pytest.raises(FormatError, match="sample 'a-17': found the image entry"):
        handle.get()


def test_no_fault_ever_becomes_a_wrong_image(corpus, store):
    chance = random.Random(3)
    kinds = [faults.right] * 6 + [faults.short, faults.one_too_many, faults.wrong, faults.time_out]
    store.always = staticmethod(lambda data: chance.choice(kinds)(data))
    known = image_reads(corpus)
    refused = 0
    with PrefetchPool(BundleReader(store.url), num_threads=4) as pool:
        for key, (request, _) in enumerate(known):
            pool.submit(key, [request])
        for key, (_, data) in enumerate(known):
            try:
                assert pool.get(key) == [data]
            except ReadError:
                refused += 1
        assert pool.counters()["retries"] > 100
    assert refused < len(known) / 4


def hold_reads(store):
    """Reads wait from now on until the event is set that this returns."""
    may_go_on = threading.Event()

    def held(data):
        may_go_on.wait()
        return data

    store.always = staticmethod(held)
    return may_go_on


def test_a_cancelled_key_is_not_read(corpus, store):
    (first, data), (second, _), *_ = image_reads(corpus)
    may_go_on = hold_reads(store)
    with PrefetchPool(BundleReader(store.url), num_threads=1) as pool:
        pool.submit("running", [first])
        wait_until(lambda: len(store.reads) == 1)
        pool.submit("queued", [second])
        pool.submit("queued", [second])
        assert [pool.cancel("queued"), pool.cancel("queued")] == [True, False]
        with pytest.raises(UsageError, match="key 'queued': not submitted in this process, cancelled"):
            pool.get("queued")
        may_go_on.set()
        assert pool.get("running") == [data]
    assert len(store.reads) == 1


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_who_waits_for_a_key_that_goes_is_told(corpus, store, end):
    (request, _), *_ = image_reads(corpus)
    may_go_on = hold_reads(store)
    pool = PrefetchPool(BundleReader(store.url), num_threads=1)
    pool.submit("x", [request])
    with ThreadPoolExecutor(1) as getters:
        waiting = getters.submit(pool.get, "x")
        wait_until(lambda: pool.counters()["waits"] == 1)
        pool.cancel("x") if end == "cancel" else pool.close()
        with pytest.raises(ReadCancelled, match="cancelled before its reads" if end == "cancel" else "pool was closed"):
            waiting.result()
    may_go_on.set()
    wait_until(lambda: pool.counters()["held_bytes"] == 0)
    pool.close()


def test_a_closed_pool_has_no_thread_and_refuses(corpus):
    pool = PrefetchPool(BundleReader(corpus.url), num_threads=3)
    pool.submit("x", [SampleRead(row=row) for row in corpus.rows])
    pool.get("x")
    assert 1 <= len(pool_threads()) <= 3
    pool.close()
    pool.close()
    wait_until(lambda: not pool_threads())
    for use in (lambda: pool.submit("y", []), lambda: pool.get("x")):
        with pytest.raises(ReadCancelled, match="this prefetch pool was closed"):
            use()


def test_a_pool_that_is_dropped_ends_its_threads(corpus):
    pool = PrefetchPool(BundleReader(corpus.url))
    pool.submit("x", [SampleRead(row=row) for row in corpus.rows[:50]]).get()
    assert pool_threads()
    del pool
    gc.collect()
    wait_until(lambda: not pool_threads())


def test_threads_begin_with_the_first_submit(corpus):
    pool = PrefetchPool(BundleReader(corpus.url))
    assert pool_threads() == []
    assert pool.counters()["keys"] == 0
    with pytest.raises(UsageError, match="found num_threads 0, max_bytes"):
        PrefetchPool(BundleReader(corpus.url), num_threads=0)


# --- reads that never return ---


def test_a_read_that_never_returns_is_made_again_by_another_thread(corpus, store):
    known = image_reads(corpus)[:6]
    store.once.append(store.never)
    with PrefetchPool(BundleReader(store.url), num_threads=1, read_deadline_seconds=DEADLINE_SECONDS) as pool:
        for key, (request, _) in enumerate(known):
            pool.submit(key, [request])
        assert [pool.get(key) for key in range(len(known))] == [[data] for _, data in known]
        counters = pool.counters()
        assert (counters["abandoned"], counters["retries"], counters["errors"], counters["held_bytes"]) == (1, 1, 0, 0)
        assert len(pool_threads()) == 2
        store.hanging.set()
        wait_until(lambda: len(pool_threads()) == 1)
        assert pool.submit("more", [known[0][0]]).get() == [known[0][1]]


def test_a_late_answer_of_a_read_that_was_given_up_changes_nothing(corpus, store):
    row, record, images = max(zip(corpus.rows, corpus.records, corpus.images, strict=True), key=lambda item: len(item[2]))
    store.once.append(store.never)
    with PrefetchPool(BundleReader(store.url), num_threads=2, read_deadline_seconds=DEADLINE_SECONDS) as pool:
        handle = pool.submit("x", [SampleRead(row=row)])
        with ThreadPoolExecutor(1) as getters:
            waiting = getters.submit(pool.get, "x")
            wait_until(lambda: pool.counters()["abandoned"] == 1)
            store.hanging.set()
            assert waiting.result() == [Sample(record=record, images=images)]
        wait_until(lambda: pool.counters()["held_bytes"] == 0)
        assert handle.get() == [Sample(record=record, images=images)]


def test_a_read_that_never_returns_twice_is_refused_by_name_and_others_go_on(corpus, store):
    (request, _), (other, data), *_ = image_reads(corpus)
    store.once.extend([store.never, store.never])
    with PrefetchPool(BundleReader(store.url), num_threads=1, read_deadline_seconds=DEADLINE_SECONDS, max_abandoned=2) as pool:
        pool.submit("hangs", [request])
        pool.submit("good", [other])
        with pytest.raises(
            ReadStalled, match=r"read 2 times, found no answer within 1 seconds: its store or mount hangs"
        ) as caught:
            pool.get("hangs")
        place = caught.value.place
        assert (place.file, place.offset) == (request.entry["bundle"], request.entry["offset"])
        assert pool.get("good") == [data]


def test_a_store_that_hangs_altogether_is_an_error_and_takes_no_more_threads(corpus, store):
    known = image_reads(corpus)[:9]
    store.always = store.never
    with PrefetchPool(BundleReader(store.url), num_threads=2, read_deadline_seconds=DEADLINE_SECONDS, max_abandoned=2) as pool:
        for key, (request, _) in enumerate(known):
            pool.submit(key, [request])
        for key in range(len(known)):
            with pytest.raises(ReadStalled, match="never came back" if key else "hangs"):
                pool.get(key)
        assert len(pool_threads()) <= 2 + 2 + 1
        with pytest.raises(ReadStalled, match="this read and 2 others never came back"):
            pool.submit("more", [])


def test_a_hanging_read_of_a_key_nobody_wants_any_more_gives_its_thread_back(corpus, store):
    (first, _), (second, data), *_ = image_reads(corpus)
    store.once.append(store.never)
    with PrefetchPool(BundleReader(store.url), num_threads=1, read_deadline_seconds=DEADLINE_SECONDS) as pool:
        pool.submit("hangs", [first])
        wait_until(lambda: len(store.reads) == 1)
        pool.submit("good", [second])
        assert pool.cancel("hangs")
        assert pool.get("good") == [data]


# --- processes ---


def in_child(pool, handle, corpus, connection):
    inherited = (len(pool_threads()), open_bundles())
    try:
        pool.get("from the parent")
        known = True
    except UsageError:
        known = False
    reads = [SampleRead(row=row) for row in corpus.rows]
    pool.submit("mine", reads)
    connection.send((inherited, known, handle.get() == samples(corpus)[:9], pool.get("mine") == samples(corpus)))
    connection.close()


@may_fork
def test_no_thread_descriptor_or_lock_crosses_a_fork(corpus, pool):
    """Forked again and again while threads of the parent read, so that some fork finds every lock taken."""
    handle = pool.submit("from the parent", [SampleRead(row=row) for row in corpus.rows[:9]])
    context = multiprocessing.get_context("fork")
    for number in range(5):
        pool.submit(number, [SampleRead(row=row) for row in corpus.rows])
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=in_child, args=(pool, handle, corpus, theirs))
        child.start()
        theirs.close()
        assert pool.get(number) == samples(corpus)
        assert ours.poll(120), "the child hangs"
        (num_threads, num_bundles), *rest = ours.recv()
        assert (num_threads, *rest) == (0, False, True, True)
        assert num_bundles <= 4, "but for what the threads were opening at that moment"
        child.join(60)
        assert child.exitcode == 0
        ours.close()
    assert pool.get("from the parent") == samples(corpus)[:9]


def test_a_pickled_pool_begins_empty(corpus, pool):
    handle = pool.submit("x", [SampleRead(row=corpus.rows[0])])
    twin, twin_handle = pickle.loads(pickle.dumps((pool, handle)))
    assert twin.counters()["keys"] == 0
    assert twin_handle.get() == handle.get() == samples(corpus)[:1]
    twin.close()


@may_fork
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_torch_loader_have_pools_of_their_own(corpus, method):
    from packed import PooledSamples
    from torch.utils.data import DataLoader

    with PrefetchPool(BundleReader(corpus.url), num_threads=2) as pool:
        rows = corpus.rows[:60]
        pool.submit("before", [SampleRead(row=rows[0])]).get()
        loader = DataLoader(PooledSamples(pool, rows), num_workers=2, batch_size=None, multiprocessing_context=method)
        found = list(loader)
    assert sorted(sample.record["id"] for sample in found) == sorted(record["id"] for record in corpus.records[:60])
    expected = {sample.record["id"]: sample.images for sample in samples(corpus)[:60]}
    assert all(sample.images == expected[sample.record["id"]] for sample in found)


# --- a long run ---


def test_a_hundred_thousand_samples_leave_memory_threads_and_descriptors_as_they_were(corpus):
    known = [item for item in image_reads(corpus) if len(item[1]) < 8_000]
    assert len(known) > 100
    process = psutil.Process()
    with PrefetchPool(BundleReader(corpus.url, max_open=4), num_threads=3, max_bytes=1 << 20) as pool:

        def run(start, stop, per_key=10, ahead=8):
            for first in range(start, stop + ahead * per_key, per_key):
                if first < stop:
                    pool.submit(first, [known[(first + number) % len(known)][0] for number in range(per_key)])
                if first - ahead * per_key >= start:
                    key = first - ahead * per_key
                    assert pool.get(key)[0] == known[key % len(known)][1]
            gc.collect()
            return process.memory_info().rss, process.num_fds(), len(pool_threads())

        warm = run(0, 20_000)
        after = run(20_000, 120_000)
        assert pool.counters()["held_bytes"] == 0
    assert after[0] < warm[0] * 1.02 + (1 << 20)
    assert abs(after[1] - warm[1]) <= 4
    assert after[2] <= 3


def test_nothing_is_left_open(corpus):
    gc.collect()  # other tests may have left bundles to it
    before = open_bundles()
    with PrefetchPool(BundleReader(corpus.url)) as pool:
        pool.submit("x", [SampleRead(row=row) for row in corpus.rows]).get()
        assert open_bundles() > before
        pool.reader.close()
        assert open_bundles() == before
