"""Around the kernels: threads, scratch memory, the tensors a layer holds, what is compiled when."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from subprocesses import digest, run
from torch import Tensor

import expertile
from expertile.codegen import isa as isas
from expertile.codegen.compiler import counters
from expertile.runtime import layer as runtime
from expertile.runtime import repeat, workspace
from expertile.runtime.call import table_slots
from expertile.runtime.matrices import LayerWeights

# Large enough for all threads: gate/up and down read 8 × 256 × 512 weight elements and more.
SHAPE: dict[str, Any] = {
    "tokens": 24,
    "experts": 8,
    "top_k": 2,
    "hidden": 512,
    "intermediate": 256,
}


def make_case(seed: int = 1, **shape: Any) -> oracle.Case:
    return oracle.make_case(seed, **SHAPE | shape)


@pytest.fixture
def empty_pool() -> Iterator[None]:
    """No scratch memory is held at the start, nor what the test made at the end."""
    workspace.clear()
    yield
    workspace.clear()


# Python threads -----------------------------------------------------------------------------------


def test_eight_threads_at_once(empty_pool: None) -> None:
    """Different shapes, each computed over and over by two threads, from the kernels' first use on."""
    cases = [
        make_case(seed, tokens=tokens, hidden=hidden, intermediate=32 * (seed + 1))
        for seed, (tokens, hidden) in enumerate([(1, 272), (5, 400), (16, 512), (33, 336)])
    ]
    start = threading.Barrier(8)

    def repeat(case: oracle.Case) -> list[str]:
        start.wait()
        return [digest(case.run()) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(repeat, cases * 2))
    for case, digests in zip(cases * 2, results, strict=True):
        expected = case.run()
        oracle.check(case, expected)
        assert set(digests) == {digest(expected)}


def _posts_a_semaphore_that_a_kernel_waits_for() -> bool:
    import ctypes
    import threading
    import time

    import oracle

    from expertile.runtime import repeat, workspace
    from expertile.runtime.spec import LayerKernels

    case = oracle.make_case(1, tokens=1, experts=1, top_k=1, hidden=64, intermediate=32, nowhere=0)
    case.run()
    # The kernel that gathers tokens gets x as its first argument: sem_wait takes its place.
    libc = ctypes.CDLL(None)
    semaphore = ctypes.c_void_p(case.x.data_ptr())
    libc.sem_init(semaphore, 0, 0)
    wait = ctypes.cast(libc.sem_wait, ctypes.c_void_p).value or 0
    ends = LayerKernels.ends
    repeat._known.clear()
    LayerKernels.ends = lambda *names: (wait, ends(*names)[1])  # type: ignore[method-assign]
    space = workspace.Workspace()
    workspace.acquire = lambda: space
    thread = threading.Thread(target=case.run)
    thread.start()
    while space.read("active") == 0:  # written by the driver, from inside the native call
        time.sleep(0.001)
    alive = thread.is_alive()
    libc.sem_post(semaphore)
    thread.join()
    return alive


def test_other_python_threads_run_during_a_call() -> None:
    """A call that only another Python thread can end does end: it doesn't hold the GIL."""
    assert run(_posts_a_semaphore_that_a_kernel_waits_for, timeout=120)


# OpenMP threads -----------------------------------------------------------------------------------


def _digest_with_threads(threads: int, shape: dict[str, Any]) -> str:
    import oracle
    import torch
    from subprocesses import digest

    torch.set_num_threads(threads)
    return digest(oracle.make_case(1, **shape).run())


@pytest.mark.parametrize(
    "env",
    [
        {"OMP_THREAD_LIMIT": "1"},
        {"OMP_THREAD_LIMIT": "2"},
        {"OMP_DYNAMIC": "true"},
        {"OMP_NUM_THREADS": "1"},
        {"OMP_WAIT_POLICY": "active"},
        {"OMP_WAIT_POLICY": "passive", "OMP_PROC_BIND": "true"},
    ],
    ids=lambda env: " ".join(f"{name}={value}" for name, value in env.items()),
)
def test_fewer_threads_than_asked_for(env: dict[str, str]) -> None:
    with oracle.threads(1):
        expected = digest(make_case().run())
    assert run(_digest_with_threads, 16, SHAPE, env=env) == expected


@pytest.mark.parametrize("threads", [2, 3, 4, 7])
@pytest.mark.parametrize("hidden", [16, 40, 528, 1456])
def test_any_number_of_threads_divides_any_number_of_columns(hidden: int, threads: int) -> None:
    """Each thread begins with columns of its own, also where there are more or fewer than threads."""
    case = make_case(hidden=hidden, intermediate=1024)
    with oracle.threads(1):
        expected = case.run()
    with oracle.threads(threads):
        found = case.run()
    oracle.check(case, found)
    assert digest(found) == digest(expected)


def _threads_started(shape: dict[str, Any]) -> dict[str, int]:
    """OS threads that each step adds to the process."""
    import oracle
    import torch
    from subprocesses import os_threads

    torch.set_num_threads(1)
    case = oracle.make_case(1, **shape)
    tiny = oracle.make_case(1, tokens=1, experts=1, top_k=1, hidden=32, intermediate=32, nowhere=0)
    started = {}

    def step(name: str, case: oracle.Case, **changes: Any) -> None:
        before = os_threads()
        case.run(**changes)
        started[name] = os_threads() - before

    step("one thread", case)
    torch.set_num_threads(2)
    step("no token", case, **case.tokens([]))
    step("no expert", case, ids=case.ids[:, :0], router=case.router[:, :0])
    step("nobody here", case, ids=torch.full_like(case.ids, -1))
    step("tiny", tiny)
    step("two threads", case)
    torch.set_num_threads(5)
    step("five threads", case)
    torch.set_num_threads(1)
    step("one again", case)
    return started


def test_threads_wake_for_work_and_as_pytorch_says() -> None:
    assert run(_threads_started, SHAPE, env={"OMP_DYNAMIC": "", "OMP_THREAD_LIMIT": ""}) == {
        "one thread": 0,
        "no token": 0,
        "no expert": 0,
        "nobody here": 0,
        "tiny": 0,
        "two threads": 1,
        "five threads": 3,
        "one again": 0,
    }


def test_in_turns_with_bf16_matrix_products() -> None:
    """PyTorch's own kernels, which configure tiles where there are any, on the same threads."""
    case = make_case(tokens=3)
    a, b = torch.randn(64, 256).bfloat16(), torch.randn(256, 192).bfloat16()
    layer, product = case.run(), torch.mm(a, b)
    oracle.check(case, layer)
    torch.testing.assert_close(product, (a.float() @ b.float()).bfloat16())
    for _ in range(1000):
        assert torch.equal(torch.mm(a, b), product)
        assert torch.equal(case.run(), layer)


# The tensors --------------------------------------------------------------------------------------


def bind(case: oracle.Case) -> expertile.Layer:
    spec = expertile.ExpertSpec(
        SHAPE["hidden"], SHAPE["intermediate"], SHAPE["experts"], SHAPE["top_k"], gate=case.gate
    )
    return expertile.compile(spec, rows=[1]).bind(case.gate_up, case.down)


@pytest.mark.parametrize("weight", ["gate_up", "down"])
def test_weight_changes_are_seen_by_the_next_call(weight: str) -> None:
    case = make_case()
    layer = bind(case)
    tensor: Tensor = getattr(case, weight)
    other = getattr(make_case(2), weight)
    results = []

    def compute() -> None:
        result = case.run()
        oracle.check(case, result)
        oracle.assert_same_bits(layer(case.x, case.ids, case.router), result)
        results.append(digest(result))

    compute()
    tensor.mul_(-0.5)
    compute()
    tensor[3].copy_(other[3])
    compute()
    tensor.data = other.clone()  # elsewhere in memory
    compute()
    tensor.data = other.mT.contiguous().mT.clone(memory_format=torch.contiguous_format) / 2
    compute()
    wide = torch.zeros(*other.shape[:2], other.shape[2] + 32, dtype=torch.bfloat16)
    wide[..., : other.shape[2]] = other / 4
    tensor.data = wide[..., : other.shape[2]]  # with other strides
    compute()
    assert len(set(results)) == len(results)


def test_bind_holds_the_tensors() -> None:
    case = make_case()
    layer = expertile.compile(expertile.ExpertSpec(512, 256, 8, 2), rows=[1]).bind(
        case.gate_up.clone(), case.down.clone()
    )
    rubbish = [torch.full_like(case.gate_up, float("nan")) for _ in range(4)]
    oracle.assert_same_bits(layer(case.x, case.ids, case.router), case.run())
    del rubbish


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 256}, r"hidden: the spec says 256, the tensors say 512"),
        ({"intermediate": 512}, r"intermediate: the spec says 512, the tensors say 256"),
        ({"experts": 4}, r"experts: the spec says 4, the tensors say 8"),
        ({"down_bias": "f32"}, r"down_bias: the spec says 'f32', the tensors say None"),
    ],
)
def test_bind_refuses_weights_of_another_spec(change: dict[str, Any], message: str) -> None:
    case = make_case()
    spec = expertile.ExpertSpec(
        **{"hidden": 512, "intermediate": 256, "experts": 8, "top_k": 2} | change
    )
    with pytest.raises(expertile.ArgumentError, match=message):
        expertile.Kernels(spec).bind(case.gate_up, case.down)


def test_a_default_device_elsewhere_changes_nothing(empty_pool: None) -> None:
    """torch.set_default_device is where an engine with a GPU makes its tensors; the layer stays here."""
    case = make_case()
    expected = case.run()
    workspace.clear()
    with torch.device("meta"):
        result = case.run()
        nothing = case.run(ids=case.ids[:, :0], router=case.router[:, :0])
    oracle.assert_same_bits(result, expected)
    oracle.assert_same_bits(nothing, torch.zeros_like(case.x))


# Memory -------------------------------------------------------------------------------------------


def scratch_bound(case: oracle.Case, tokens: int) -> int:
    """2·T·k·(H + I) bytes of operands, 24 of lists for a token and expert, and what threads have of their own."""
    hidden, intermediate = case.x.shape[1], case.down.shape[2]
    slots = tokens * case.ids.shape[1]
    own = (1 << 20) + 4 * 64 * tokens
    return (
        slots * (2 * (hidden + intermediate + 62) + 48)
        + 32 * case.gate_up.shape[0]
        + torch.get_num_threads() * own
        + 4096
    )


@pytest.mark.parametrize("tokens", [1, 100, 1000])
def test_scratch_is_proportional_to_tokens(empty_pool: None, tokens: int) -> None:
    case = make_case(tokens=tokens)
    case.run()
    assert 0 < workspace.held_bytes() <= scratch_bound(case, tokens)


def test_scratch_is_reused(empty_pool: None) -> None:
    case = make_case(tokens=64)
    case.run()
    held = workspace.held_bytes()
    for tokens in (64, 1, 33, 64):
        case.run(**case.tokens(range(tokens)))
    assert workspace.held_bytes() == held


def test_scratch_survives_an_error(empty_pool: None) -> None:
    case = make_case()
    case.run()
    held = workspace.held_bytes()
    with pytest.raises(expertile.ArgumentError):
        case.run(ids=case.ids + SHAPE["experts"])
    assert workspace.held_bytes() == held
    oracle.check(case, case.run())


def test_scratch_cap_is_as_documented() -> None:
    assert runtime.SCRATCH_CAP == 512 << 20
    assert runtime.LEAST_CHUNK == 2048


@pytest.fixture
def small_cap(monkeypatch: pytest.MonkeyPatch, empty_pool: None) -> int:
    """A cap that 300 tokens pass, for chunks of at least 64 tokens."""
    cap = 1 << 20
    monkeypatch.setattr(runtime, "SCRATCH_CAP", cap)
    monkeypatch.setattr(runtime, "LEAST_CHUNK", 64)
    return cap


def test_tokens_beyond_the_cap_come_in_chunks(
    small_cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(tokens=300, top_k=4)
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "SCRATCH_CAP", 512 << 20)
        expected = case.run()
    workspace.clear()
    repeat._known.clear()  # the cap is part of the program
    before = expertile.calls()
    result = case.run()
    assert expertile.calls() - before >= 2
    assert workspace.held_bytes() <= max(small_cap, scratch_bound(case, 64))
    oracle.assert_same_bits(result, expected)


def test_a_bad_id_in_a_later_chunk_is_found(small_cap: int) -> None:
    case = make_case(tokens=300, top_k=4)
    case.ids[271, 3] = 8
    with pytest.raises(
        expertile.ArgumentError, match=r"topk_ids: .* from 0 to 7.* got 8 for token 271, slot 3"
    ):
        case.run()


class _Guarded(workspace.Workspace):
    """Scratch with a margin behind it that nobody may write to."""

    margin, filler = 1 << 20, 0x5A

    def reserve(self, size: int) -> int:
        self.check()
        address = super().reserve(size + self.margin)
        self.behind = (ctypes.c_uint8 * self.margin).from_address(address + size)
        ctypes.memset(self.behind, self.filler, self.margin)
        return address

    def check(self) -> None:
        if hasattr(self, "behind"):
            assert bytes(self.behind) == bytes([self.filler]) * self.margin


@pytest.mark.parametrize("last", [1, 500, 1024, 2000])
def test_no_chunk_writes_past_its_scratch(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last chunk of fewer tokens may have more columns to sum up at a time, and so need more for a thread."""
    chunk = 2300
    case = make_case(
        tokens=chunk + last, experts=1, top_k=1, hidden=512, intermediate=32, nowhere=0
    )
    space = _Guarded()
    monkeypatch.setattr(workspace, "acquire", lambda: space)
    monkeypatch.setattr(workspace, "release", lambda space: space.check())
    with oracle.threads(1):
        expected = torch.cat(
            [case.run(**case.tokens(part)) for part in torch.arange(chunk + last).split(700)]
        )
        kernels = runtime.prepare(LayerWeights(case.gate_up, case.down), 1)
        per_token = runtime._scratch(kernels, None, chunk + last, 1, 1).size / (chunk + last)
        monkeypatch.setattr(runtime, "SCRATCH_CAP", int(chunk * per_token) + 1)
        before = expertile.calls()
        result = case.run()
    assert expertile.calls() == before + 2
    oracle.assert_same_bits(result, expected)


def test_few_tokens_are_never_cut(small_cap: int) -> None:
    case = make_case(tokens=64, top_k=16)
    before = expertile.calls()
    case.run()
    assert expertile.calls() == before + 1


def _grows_by() -> dict[str, int]:
    """Resident bytes that the first call adds; 24 experts of Qwen3-30B-A3B in full width."""
    import torch
    from subprocesses import resident_bytes

    import expertile
    from expertile.runtime import workspace

    experts, top_k, hidden, intermediate, tokens = 24, 8, 2048, 768, 16
    gate_up = torch.full((experts, 2 * intermediate, hidden), 0.01, dtype=torch.bfloat16)
    down = torch.full((experts, hidden, intermediate), 0.01, dtype=torch.bfloat16)
    x = torch.ones(tokens, hidden, dtype=torch.bfloat16)
    ids = torch.arange(tokens * top_k).view(tokens, top_k) % experts
    router = torch.ones(tokens, top_k)
    before = resident_bytes()
    expertile.fused_experts(x, gate_up, down, ids, router)
    return {
        "grown": resident_bytes() - before,
        "scratch": workspace.held_bytes(),
        "weights": gate_up.nbytes + down.nbytes,
    }


def test_memory_of_a_first_call(tmp_path: Path) -> None:
    """With a cold and with a warm cache: less than half of the weights, so they are not copied."""
    for _ in range(2):
        found = run(_grows_by, env={"EXPERTILE_CACHE_DIR": str(tmp_path)})
        bound = found["scratch"] + found["weights"] // 100 + (96 << 20)
        assert bound < found["weights"] // 2
        assert found["grown"] <= bound


def _two_experts_far_apart() -> dict[str, Any]:
    """An expert bank of more than 2³¹ elements, of which two experts are in memory."""
    from dataclasses import replace

    import oracle
    import torch
    from subprocesses import digest, resident_bytes

    hidden, intermediate = 1024, 1024
    experts = 2**31 // (hidden * intermediate) + 2  # down, too, has more than 2³¹ elements
    small = oracle.make_case(
        1, tokens=6, experts=2, top_k=2, hidden=hidden, intermediate=intermediate, nowhere=0
    )
    before = resident_bytes()
    gate_up = torch.empty(experts, 2 * intermediate, hidden, dtype=torch.bfloat16)
    down = torch.empty(experts, hidden, intermediate, dtype=torch.bfloat16)
    places = [3, experts - 1]
    for expert, place in enumerate(places):
        gate_up[place].copy_(small.gate_up[expert])
        down[place].copy_(small.down[expert])
    far = replace(small, gate_up=gate_up, down=down, ids=torch.tensor(places)[small.ids])
    return {
        "elements": [gate_up.numel(), down.numel()],
        "far": digest(far.run()),
        "near": digest(small.run()),
        "grown": resident_bytes() - before,
    }


def test_weight_addresses_have_64_bits() -> None:
    found = run(_two_experts_far_apart)
    assert min(found["elements"]) > 2**31
    assert found["far"] == found["near"]
    assert found["grown"] < 256 << 20


# What is compiled ---------------------------------------------------------------------------------


def test_nothing_compiles_after_compile() -> None:
    """However many tokens an expert gets; and the kernels are as few as the docstring says."""
    shape: dict[str, Any] = SHAPE | {"experts": 3, "hidden": 304, "intermediate": 48}
    case = oracle.make_case(1, **shape | {"tokens": 600})
    before = counters()
    kernels = expertile.compile(expertile.ExpertSpec(304, 48, 3, 2))
    compiled = counters()
    made = compiled.llvm + compiled.cache_hits - before.llvm - before.cache_hits
    assert made <= 2 * table_slots(isas.select().block_tokens) + 3 + 3 + 1
    layer = kernels.bind(case.gate_up, case.down)
    the_first = torch.zeros(600, 1, dtype=torch.int64)
    chosen = random.Random(1)
    for tokens in (*range(1, 201), 260, 520, 600):  # up to more blocks than a call takes
        layer(case.x[:tokens], the_first[:tokens], case.router[:tokens, :1])
        some = case.tokens(chosen.sample(range(600), tokens))
        case.run(**some)
        dtype = chosen.choice([torch.float16, torch.float32])
        layer(some["x"].to(dtype), some["ids"], some["router"])
    assert counters() == compiled


def test_compile_makes_no_more_than_asked() -> None:
    before = counters()
    expertile.compile(expertile.ExpertSpec(304, 80, 3, 2), rows=[2, 66, 34])
    now = counters()
    # For blocks of 32: 2 rows, a full block and two of them; of 64: 2 rows, 34 and a full block. Of both projections;
    # and the gathers and finishes of three dtypes, and the driver.
    assert now.llvm + now.cache_hits - before.llvm - before.cache_hits <= 2 * 3 + 3 + 3 + 1


@pytest.mark.parametrize("rows", [0, -3])
def test_compile_refuses_no_rows(rows: int) -> None:
    with pytest.raises(expertile.ArgumentError, match=rf"rows: expected .* from 1, got {rows}"):
        expertile.compile(expertile.ExpertSpec(32, 32, 1, 1), rows=[rows])


@pytest.mark.parametrize("name", ["x", "gate_up", "down", "topk_weights"])
def test_lazily_negated_views_are_refused(name: str) -> None:
    """Their memory holds the numbers before the negation, which is what a kernel would read."""
    arguments = {
        "x": torch.randn(2, 32).bfloat16(),
        "gate_up": torch.randn(2, 64, 32).bfloat16(),
        "down": torch.randn(2, 32, 32).bfloat16(),
        "topk_ids": torch.zeros(2, 1, dtype=torch.int64),
        "topk_weights": torch.rand(2, 1),
    }
    expertile.fused_experts(**arguments)
    arguments[name] = torch._neg_view(arguments[name])
    with pytest.raises(expertile.ArgumentError, match=rf"{name}: .*resolve_neg"):
        expertile.fused_experts(**arguments)
