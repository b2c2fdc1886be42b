"""One message of every type, with every field set to something that a default would not give."""

from array import array

from kvferry.common.base.ids import Incarnation, RequestId, TransferKey
from kvferry.common.protocol.messages import (
    Abort,
    Announce,
    Cancel,
    Candidate,
    Commit,
    CommitRefused,
    Committed,
    Credit,
    Envelope,
    FirstToken,
    Gone,
    Granted,
    HandedOver,
    HandoverFailed,
    Heartbeat,
    Hello,
    HelloRefused,
    Job,
    Message,
    NodeLoad,
    Piece,
    Queued,
    Refused,
    Reserve,
    Revoke,
    Status,
    Tokens,
    TokensEntry,
    WantedRequest,
    Welcome,
    WrongIncarnation,
)
from kvferry.common.protocol.model_info import Compatibility, ModelInfo
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams

SENDER = Incarnation("a1" * 16)
RECEIVER = Incarnation("b2" * 16)
WORKER = Incarnation("c3" * 16)
REQUEST = RequestId("00112233445566778899aabbccddeeff")
KEY = TransferKey(REQUEST, 2, 3, SENDER, RECEIVER)
LARGEST_SEED = 2**64 - 1

SAMPLING = SamplingParams(
    max_new_tokens=64,
    seed=LARGEST_SEED,
    do_sample=True,
    temperature=0.75,
    top_k=50,
    top_p=0.95,
    repetition_penalty=1.125,
    ignore_eos=True,
    stop_token_ids=(2, 7),
)
COMPATIBILITY = Compatibility(
    protocol_version=1,
    model="sha256:1234",
    kv_dtype="bfloat16",
    kv_layout="k[3,64] v[3,64]",
    block_size=16,
    num_layers=30,
)
MODEL = ModelInfo(
    name="smol",
    vocab_size=49152,
    max_model_len=2048,
    max_position_embeddings=8192,
    eos_token_ids=(2, 0),
    default_top_k=1000,
    default_do_sample=True,
    tokenizer_path="models/smol/tokenizer.json",
)
LOAD = NodeLoad(
    waiting_requests=1,
    waiting_tokens=2,
    running_requests=3,
    total_blocks=4,
    free_blocks=5,
    reserved_blocks=6,
    block_size=16,
    prefix_hit_tokens=8,
    prompt_tokens=9,
    preemptions=10,
    swaps=11,
)
IDS = array("I", [1, 2, 0xFFFFFFFF, 49151])
MORE_IDS = array("I", [9])

SPEC = RequestSpec(
    model="smol",
    prompt_token_ids=IDS,
    output_token_ids=MORE_IDS,
    sampling=SAMPLING,
    priority=3,
    trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)

SAMPLES: tuple[Message, ...] = (
    Announce(name="prefill-0", role="prefill", model="smol", endpoint="tcp://10.0.0.1:5555"),
    Hello(kind="prefill", name="prefill-0", compatibility=COMPATIBILITY),
    Welcome(
        name="decode-0",
        roles=("prefill", "decode"),
        model=MODEL,
        compatibility=COMPATIBILITY,
        kv_endpoints=("tcp://10.0.0.2:6000", "tcp://10.0.0.2:6001"),
        transports=("zmq", "shm"),
    ),
    HelloRefused(reason="block_size: 16 != 32"),
    WrongIncarnation(),
    Heartbeat(
        heartbeat_no=17,
        as_of=12,
        wanted=(
            WantedRequest(request_id=REQUEST, attempt=2, next_index=5, expected=True, resend=True, generation=3),
            WantedRequest(request_id=RequestId("ff" * 16), attempt=1, next_index=0, expected=False),
        ),
        last=True,
    ),
    Status(status_no=9, draining=True, steps_done=1000, step_age_ms=12, work_waiting=True, load=LOAD, link_seq=44),
    Job(
        request_id=REQUEST,
        attempt=2,
        placement_no=12,
        spec=SPEC,
        remaining_ms=599_000,
        waited_ms=250,
        candidates=(Candidate(incarnation=RECEIVER, name="decode-0", endpoint="tcp://10.0.0.2:5555"),),
    ),
    Cancel(request_id=REQUEST, attempt=2, reason="client_gone"),
    Gone(request_id=REQUEST, attempt=2, reason="preempted", detail="drain"),
    FirstToken(request_id=REQUEST, attempt=2, index=1, token_id=198, finish="stop", cached_tokens=32),
    HandedOver(request_id=REQUEST, attempt=2, decode=RECEIVER),
    HandoverFailed(
        request_id=REQUEST, attempt=2, reason="no_room", retained=True, commit_sent=True, retryable=False, detail="full"
    ),
    Reserve(
        key=KEY,
        transfer_no=8,
        placement_no=12,
        worker=WORKER,
        spec=SPEC,
        remaining_ms=598_000,
        waited_ms=1250,
    ),
    Granted(key=KEY, first_token=32),
    Queued(key=KEY),
    Refused(key=KEY, reason="full"),
    Piece(
        key=KEY,
        number=4,
        layer_start=10,
        layer_end=15,
        token_start=32,
        token_end=36,
        num_bytes=8,
        checksum=0xFFFFFFFE,
        data=b"\x00\x01\xfe\xff\x10\x20\x30\x40",
    ),
    Credit(key=KEY, slot=4),
    Commit(
        key=KEY, num_pieces=6, first_token_pos=32, num_tokens=36, token_id=198, cached_tokens=32
    ),
    Committed(key=KEY, missing=(1, 4)),
    CommitRefused(key=KEY, reason="checksum"),
    Abort(key=KEY, stopped=False),
    Revoke(key=KEY, reason="drain"),
    Tokens(
        link_seq=44,
        entries=(
            TokensEntry(
                request_id=REQUEST, attempt=2, first_index=1, token_ids=(198, 7), finish="length", cached_tokens=32
            ),
            TokensEntry(request_id=REQUEST, attempt=1, first_index=0, token_ids=(), error="logits are not numbers"),
        ),
    ),
)  # fmt: skip


def envelope(message: Message) -> Envelope:
    """The message between the two sample lives."""
    return Envelope(SENDER, RECEIVER, message)
