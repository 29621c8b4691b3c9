"""A balanced loader on one rank: state, ends, refusals, and what surrounds it."""

import os
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exchange_scenarios import COST, LENGTH, PROFILE, Local, Sorted, Source, balanced, made_pack, plan_of, seen

from packer.format.errors import FormatError, UsageError
from plugin.exchange.cuda import CudaDevice
from plugin.exchange.errors import ExchangeError
from plugin.reorder import BalancedLoader, LoaderCheckpoint, Parallel, chunk_iterators
from plugin.reorder.planner import refuse_broken


def alone(source, **changes):
    return balanced(source, 1, **changes)


def test_one_rank_needs_no_other_and_is_dealt_by_the_plan():
    loader = alone(Source(0, 8))
    packs = [seen(pack) for pack in loader]
    made = [made_pack(0, number) for number in range(8)]
    for first in (0, 4):
        costs = [-(pack.batch.encoder_cost + pack.batch.llm_cost) for pack in made[first : first + 4]]
        order = np.argsort(costs, kind="stable")
        assert packs[first : first + 4] == [seen(made[first + place]) for place in order]
    assert loader.num_loss_tokens == sum(pack.batch.num_loss_tokens for pack in made[4:])
    assert loader.counters.num_moved == 0


def test_nothing_is_read_before_the_first_pack_is_asked_for():
    source = Source(0, 8)
    loader = alone(source)
    assert (source.calls, source.threads) == (0, set())
    loader.restore_state(loader.save_state())
    assert source.calls == 0
    next(loader)
    assert source.calls > 0


def test_with_no_workers_only_the_trainers_thread_asks_the_source():
    source = Source(0, 12, num_workers=0)
    assert len(list(alone(source))) == 12
    assert source.threads == {threading.current_thread().name}


@pytest.mark.parametrize("num_workers", [None, 2])
def test_else_the_background_thread_reads(num_workers):
    source = Source(0, 8, num_workers=num_workers)
    assert len(list(alone(source))) == 8
    assert "bayplan-reorder" in source.threads


@pytest.mark.parametrize("num_workers", [None, 0])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_every_position_resumes_to_the_same_tail(num_workers, num_microbatches):
    def loader():
        return alone(Source(0, 12, num_workers=num_workers), num_microbatches=num_microbatches)

    one = loader()
    states, packs = [one.save_state()], []
    for pack in one:
        packs.append(seen(pack))
        states.append(one.save_state())
    assert len(packs) == 12 // num_microbatches * num_microbatches
    for position, state in enumerate(states):
        again = loader()
        again.restore_state(state)
        assert again.save_state() == state
        assert [seen(pack) for pack in again] == packs[position:]


def test_the_number_of_microbatches_may_follow_the_step():
    def loader():
        return alone(Source(0, 12), num_microbatches=lambda step: 2 + step)

    one, steps, states = loader(), [], []
    for _ in one:
        steps.append(one.step)
        states.append(one.save_state())
    assert steps == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    again = loader()
    again.restore_state(states[3])
    assert [again.step for _ in again] == steps[4:]


def test_state_is_made_of_builtin_types_and_says_what_it_belongs_to():
    loader = alone(Source(0, 8))
    next(loader)
    assert loader.save_state() == {
        "version": 1,
        "dp_size": 1,
        "profile": PROFILE,
        "cost": COST,
        "planner": "sorted",
        "num_microbatches": 4,
        "has_snapshot": True,
        "snapshot": {"position": 0},
        "step": 0,
        "yielded": 1,
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dp_size": 64}, "found dp_size 64 instead of 1"),
        ({"profile": "other"}, f"found profile 'other' instead of '{PROFILE}'"),
        ({"cost": "other"}, f"found cost 'other' instead of '{COST}'"),
        ({"version": 2}, "found version 2 instead of 1"),
        ({"planner": "dp"}, "found planner 'dp' instead of 'sorted'"),
        ({"num_microbatches": 8}, "found num_microbatches 8 instead of 4"),
        ({"has_snapshot": False}, "found that of a rank that does not read"),
    ],
)
def test_the_state_of_another_run_is_refused_with_both_values(change, said):
    loader = alone(Source(0, 8))
    next(loader)
    with pytest.raises(UsageError, match=said):
        alone(Source(0, 8)).restore_state(loader.save_state() | change)


def test_between_global_batches_the_planner_and_the_batch_size_may_change():
    loader = alone(Source(0, 12))
    for _ in range(4):
        next(loader)
    again = alone(Source(0, 12), planner=Local(), num_microbatches=2)
    again.restore_state(loader.save_state())
    assert [seen(pack) for pack in again] == [seen(made_pack(0, number)) for number in range(4, 12)]


@pytest.mark.parametrize("state", [None, [], {"position": 3}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(UsageError, match="expected what save_state of a balanced loader returned"):
        alone(Source(0, 8)).restore_state(state)


@pytest.mark.parametrize(
    "change", [{"yielded": -1}, {"yielded": 4}, {"yielded": None}, {"step": -1}, {"step": "0"}, {"num_microbatches": 1}]
)
def test_a_damaged_place_in_a_state_is_refused(change):
    loader = alone(Source(0, 8))
    next(loader)
    with pytest.raises(UsageError, match="expected a place before the last; the state is damaged"):
        alone(Source(0, 8)).restore_state(loader.save_state() | change)


class Interrupted(Source):
    """The trainer is interrupted while it reads, once."""

    interrupted_at = 0

    def __next__(self):
        if self.position == self.interrupted_at:
            self.interrupted_at = -1
            raise KeyboardInterrupt
        return super().__next__()


@pytest.mark.parametrize("interrupted_at", [0, 2, 4, 6])
def test_packs_that_were_read_when_the_trainer_was_interrupted_are_not_lost(interrupted_at):
    source = Interrupted(0, 12, num_workers=0)
    source.interrupted_at = interrupted_at
    loader, packs = alone(source), []
    with pytest.raises(KeyboardInterrupt):
        packs += (seen(pack) for pack in iter(loader.__next__, None))
    with pytest.raises(ExchangeError, match=r"reading was interrupted \(KeyboardInterrupt\); go on from the last state"):
        packs += (seen(pack) for pack in iter(loader.__next__, None))
    again = alone(Source(0, 12))
    again.restore_state(loader.save_state())
    packs += (seen(pack) for pack in again)
    assert packs == [seen(pack) for pack in alone(Source(0, 12))]


def test_the_state_in_the_midst_of_the_first_global_batch_is_that_before_it():
    # Asked of a source that another thread reads from, it would be that of any place, or none.
    reached, go_on = threading.Event(), threading.Event()

    class Waiting(Source):
        def __next__(self):
            if self.position == 2:
                reached.set()
                go_on.wait(10)
            return super().__next__()

    loader = alone(Waiting(0, 8))
    thread = threading.Thread(target=next, args=(loader,))
    thread.start()
    assert reached.wait(10)
    try:
        assert loader.save_state()["snapshot"] == {"position": 0}
        with pytest.raises(UsageError, match="found a second thread that asks for packs, expected one at a time"):
            next(loader)
    finally:
        go_on.set()
        thread.join()
    assert loader.save_state()["yielded"] == 1


def test_a_forked_child_is_refused_instead_of_waiting_for_a_thread_it_does_not_have():
    loader = alone(Source(0, 16))
    packs = [seen(next(loader)) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            next(loader)
        except UsageError as error:
            os._exit(7 if "found a process forked from the one that made it" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    packs += (seen(pack) for pack in loader)
    assert packs == [seen(pack) for pack in alone(Source(0, 16))]


def test_a_state_is_refused_once_packs_were_handed_out():
    loader = alone(Source(0, 8))
    state = loader.save_state()
    next(loader)
    with pytest.raises(UsageError, match="after the first pack, expected it before"):
        loader.restore_state(state)


def test_a_closed_loader_takes_no_state_since_no_pack_would_come():
    loader = alone(Source(0, 8))
    state = loader.save_state()
    loader.close()
    assert loader.save_state() == state
    with pytest.raises(UsageError, match=r"found a state to restore after close\(\), expected a new loader"):
        loader.restore_state(state)


def test_packs_of_an_unfilled_global_batch_are_named(caplog):
    loader = alone(Source(0, 6))
    assert len(list(loader)) == 4
    assert loader.dropped == (("0/4/a", "0/4/b"), ("0/5/a", "0/5/b"))
    assert "rank 0 had fewer than 4 packs. All ranks stop: 2 packs are not trained on, 2 of them read here" in caplog.text
    assert loader.save_state()["snapshot"] == {"position": 4}


def test_an_error_of_the_source_comes_up_where_its_batch_begins_and_again():
    loader = alone(Source(0, 20, fails_at=5))
    assert len([next(loader) for _ in range(4)]) == 4
    for _ in range(2):
        with pytest.raises(OSError, match="disk of stream 0 is gone"):
            next(loader)
    assert loader.save_state()["snapshot"] == {"position": 4}


@pytest.mark.parametrize("num_workers", [None, 0])
def test_a_state_is_that_of_the_beginning_where_the_first_batch_fails(num_workers):
    source = Source(0, 20, num_workers=num_workers, fails_at=2)
    loader = alone(source)
    with pytest.raises(OSError, match="disk of stream 0 is gone"):
        next(loader)
    assert source.position == 2
    state = loader.save_state()
    again = alone(Source(0, 20))
    again.restore_state(state)
    assert len(list(again)) == 20


def test_packs_of_another_profile_or_length_are_refused():
    for wrong in ({"profile": "other"}, {"sequence_length": LENGTH + 1}):
        with pytest.raises(UsageError, match=f"found a pack of profile '{PROFILE}' and {LENGTH} tokens"):
            next(alone(Source(0, 8), **wrong))


def test_what_is_no_pack_is_refused():
    source = type("Dicts", (Source,), {"__next__": lambda self: {"tokens": []}})(0, 8)
    with pytest.raises(UsageError, match="found a dict, expected packs"):
        next(alone(source))


def test_several_packs_a_microbatch_need_a_loss_per_token():
    with pytest.raises(UsageError, match="found micro_batch_size 2 without loss_per_token, expected 1: a loss averaged over a"):
        alone(Source(0, 8), micro_batch_size=2)
    loader = alone(Source(0, 8), micro_batch_size=2, loss_per_token=True)
    assert [loader.step for _ in loader] == [0] * 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"readers": "some"}, "found readers 'some', expected 'all' or 'replica'"),
        ({"transport": "smoke"}, "found transport 'smoke', expected 'gloo' or 'nccl'"),
        ({"slice_bytes": 0}, "slice_bytes 0, expected >= 1"),
        ({"timeout_seconds": 1e10}, "found timeout_seconds 10000000000.0, expected more than 0 and at most 1,000,000,000"),
        ({"slow_seconds": float("inf")}, "found slow_seconds inf, expected more than 0 and at most"),
    ],
)
def test_wrong_arguments_are_refused(change, said):
    with pytest.raises(UsageError, match=said):
        alone(Source(0, 8), **change)


@pytest.mark.parametrize("number", [0, -1, 2.0, "8", True])
def test_a_number_of_microbatches_that_is_none_is_refused(number):
    with pytest.raises(UsageError, match="expected an integer of at least 1"):
        next(alone(Source(0, 8), num_microbatches=number))


def test_a_number_of_microbatches_may_be_one_of_numpy():
    loader = alone(Source(0, 8), num_microbatches=lambda step: np.int64(2 + step))
    assert [loader.step for _ in loader] == [0, 0, 1, 1, 1]
    assert type(loader.save_state()["num_microbatches"]) is int


def test_a_rank_that_reads_needs_a_source():
    with pytest.raises(UsageError, match="found no source on rank 0, expected one, since this rank reads"):
        alone(None)


def test_more_ranks_than_one_need_torch_distributed():
    with pytest.raises(UsageError, match=r"found no torch\.distributed"):
        alone(Source(0, 8), parallel=Parallel(rank=0, data_ranks=(0, 1)))


@pytest.mark.parametrize(
    "ranks", [{"data_ranks": (1, 2)}, {"data_ranks": (0, 0)}, {"data_ranks": (1, 0)}, {"replica_ranks": (1,)}, {"num_stages": 2}]
)
def test_ranks_that_make_no_sense_are_refused(ranks):
    with pytest.raises(UsageError, match=r"^parallel: found"):
        Parallel(rank=0, **ranks)


def test_a_broken_plan_is_refused():
    good = plan_of(np.arange(8).reshape(2, 4))
    refuse_broken(good, (2, 4), "p")
    twice = plan_of(np.arange(8).reshape(2, 4))
    twice.taken[0, 0] = 1
    for bad in (twice, SimpleNamespace(taken=good.taken, inverse=good.inverse[::-1]), plan_of(np.arange(6).reshape(2, 3))):
        with pytest.raises(UsageError, match=r"^planner 'p': found a plan"):
            refuse_broken(bad, (2, 4), "p")


def test_host_memory_is_logged_at_the_start_by_its_formula(caplog):
    caplog.set_level("INFO")
    next(alone(Source(0, 8), slice_bytes=1 << 20))
    assert "host memory: up to 2 MiB for packs: 8 (2 global batches of 4) of up to 0.0 MiB, and 2 slices of 1 MiB" in caplog.text


def test_counters_come_once_for_each_global_batch():
    finished = []
    loader = alone(Source(0, 8), on_batch=finished.append, planner=Sorted())
    assert len(list(loader)) == 8
    assert list(loader) == []
    assert [(one.step, one.num_packs, one.before, one.after, one.bound) for one in finished] == [
        (0, 4, "1.5", "1.1", "1.0"),
        (1, 4, "1.5", "1.1", "1.0"),
    ]
    assert all(one.exposed_seconds > 0 and one.read_seconds > 0 for one in finished)


def test_counters_before_the_first_pack_are_refused():
    with pytest.raises(UsageError, match="expected this to be asked after the first pack"):
        _ = alone(Source(0, 8)).num_loss_tokens


def test_chunks_of_a_virtual_pipeline_see_the_same_packs(tmp_path):
    loader, checkpoint = alone(Source(0, 8)), LoaderCheckpoint(0)
    chunks = chunk_iterators(loader, num_chunks=3, checkpoint=checkpoint)
    first = [next(chunks[0]) for _ in range(4)]
    with pytest.raises(UsageError, match=r"found chunks \[0, 4, 4\] packs behind, expected 0 each; save between steps"):
        checkpoint.save(tmp_path, loader)
    assert [[next(chunk) for _ in range(4)] for chunk in chunks[1:]] == [first, first]
    checkpoint.save(tmp_path, loader)
    rest = [list(chunk) for chunk in chunks]
    assert [len(packs) for packs in rest] == [4, 4, 4]


def test_lists_of_iterators_need_a_checkpoint():
    with pytest.raises(UsageError, match="found 2 model chunks and no checkpoint, expected one"):
        chunk_iterators(alone(Source(0, 8)), num_chunks=2, checkpoint=None)
    assert len(chunk_iterators(alone(Source(0, 8)), num_chunks=1, checkpoint=None)) == 1


def test_a_checkpoint_keeps_each_ranks_state_in_a_file(tmp_path):
    loader = alone(Source(0, 12))
    packs = [seen(next(loader)) for _ in range(6)]
    checkpoint = LoaderCheckpoint(3)
    checkpoint.save(tmp_path / "iter_6", loader)
    packs += [seen(pack) for pack in loader]
    again = alone(Source(0, 12))
    checkpoint.restore(tmp_path / "iter_6", again)
    assert [seen(pack) for pack in again] == packs[6:]
    assert [path.name for path in (tmp_path / "iter_6").iterdir()] == ["bayplan-loader-rank00003.pt"]
    with pytest.raises(FormatError, match="found no state of rank 4, expected one for each rank"):
        LoaderCheckpoint(4).restore(tmp_path / "iter_6", again)


def test_a_loader_that_is_dropped_ends_its_thread():
    loader = alone(Source(0, 8))
    assert len(list(loader)) == 8
    thread = loader._worker.thread
    del loader
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a device and back need a GPU, and NCCL one rank a GPU")
def test_a_slice_goes_over_the_device_and_comes_back(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        device = CudaDevice([0])
        sent = [device.host(64 * number) for number in (1000, 3, 70_000)]
        for memory in sent:
            assert memory.is_pinned()
            memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
        received = [device.host(len(memory)) for memory in sent]
        tickets = [device.launch(*pair, [len(pair[0])], [len(pair[0])]) for pair in zip(sent, received, strict=True)]
        for ticket in tickets:
            ticket.wait()
            assert ticket.is_done()
        assert all(torch.equal(*pair) for pair in zip(sent, received, strict=True))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_the_device_transport_is_refused_without_a_device():
    with pytest.raises(UsageError, match="found no CUDA device or no NCCL, expected both for transport 'nccl'; use 'gloo'"):
        CudaDevice([0])


def test_the_constructor_names_everything_it_takes():
    with pytest.raises(TypeError, match="unexpected keyword argument 'microbatches'"):
        BalancedLoader(Source(0, 8), microbatches=4)
