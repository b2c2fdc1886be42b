"""A request that needs half of the blocks of a decode node is served under a load of small requests. No faults."""

import random

from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import RoleName
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.sequence import SchedulerConfig
from kvferry.ops.simulate.costs import CostModel
from kvferry.ops.simulate.model import EOS_TOKEN_ID
from kvferry.ops.simulate.node import NodeSpec
from kvferry.ops.simulate.worker import SimulatedStream, WorkerSpec
from kvferry.ops.simulate.world import World

TIMERS = Timers(queued_wait_s=1.0)
SMALL_EACH_S = 0.09
SMALL, LARGE = 40, 1000
"""Prompt tokens; the decode node has blocks for 1,600."""


def node(role: RoleName, num_blocks: int, step_s: float) -> NodeSpec:
    return NodeSpec(
        name=role,
        roles=(role,),
        num_blocks=num_blocks,
        timers=TIMERS,
        layer_token_bytes=64,
        scheduler=SchedulerConfig(eos_token_ids=frozenset({EOS_TOKEN_ID}), max_step_tokens=256, max_running=64),
        costs=CostModel(step_s=step_s, kv_bytes_per_s=1e9),
    )


def test_a_large_request_is_served_under_a_steady_load_of_small_ones():
    world, rng, small = World(3), random.Random(5), list[SimulatedStream]()
    world.start_node(node("prefill", 4000, 0.004))
    world.start_node(node("decode", 400, 0.1))
    worker = world.start_worker(WorkerSpec(name="W0", timers=TIMERS))

    def ask(length: int, max_new_tokens: int) -> SimulatedStream:
        prompt = tuple(rng.randrange(3, 60) for _ in range(length))
        sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, seed=1, do_sample=True)
        return world.send_request(worker, prompt, sampling, timeout_s=20.0)

    def ask_small() -> None:
        small.append(ask(SMALL, 20))
        world.loop.after(SMALL_EACH_S, ask_small)

    world.loop.at(1.0, ask_small)
    world.loop.run_until(9.0)
    large = ask(LARGE, 8)
    world.loop.run_until(30.0)
    assert large.end is not None
    assert (large.end.outcome, large.end.attempts) == ("length", 1)
    ended = [stream.end.outcome for stream in small if stream.end is not None]
    assert len(ended) > 100
    assert set(ended) == {"length"}
