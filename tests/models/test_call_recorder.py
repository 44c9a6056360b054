"""A recorded network satisfies the protocols of the network, on every version of Python."""

import inspect
from typing import _get_protocol_attrs  # public from Python 3.13 on, as get_protocol_members

import pytest
from test_gated_lora import adapter_for

from architectures import tiny
from saltus.core.protocols import ReadsTargetKVCache
from saltus.evaluation.benchmarks.call_recorder import MEMBERS_OF_PROTOCOLS, record_calls
from saltus.methods.assd.network import AnySubsetNetwork
from saltus.methods.assd.xlnet import XlnetNetwork
from saltus.models.causal import CausalNetwork
from saltus.models.protocols import DrafterHost, FillsHoles, KeepsKeysAndValues, TargetNetwork
from saltus.testing import toy_network
from tiny_models import tiny_llama, tiny_xlnet

PROTOCOLS = TargetNetwork, FillsHoles, DrafterHost, KeepsKeysAndValues, ReadsTargetKVCache
NETWORKS = {
    "causal": lambda: CausalNetwork(tiny("Llama")),
    "any-subset": lambda: AnySubsetNetwork(tiny_llama(any_subset={"mask": 90, "blank": 91})),
    "XLNet": lambda: XlnetNetwork(tiny_xlnet()),
    "toy": toy_network,
}


def statically(instance: object, protocol: type) -> bool:
    """`isinstance` as Python 3.12 and later see a protocol: by `inspect.getattr_static`."""
    nothing = object()
    return all(inspect.getattr_static(instance, name, nothing) is not nothing for name in _get_protocol_attrs(protocol))


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_recorder_satisfies_what_its_network_satisfies(kind):
    network = NETWORKS[kind]()
    recorder = record_calls(network)
    for protocol in PROTOCOLS:
        assert isinstance(recorder, protocol) == isinstance(network, protocol)
        assert statically(recorder, protocol) == statically(network, protocol) == isinstance(network, protocol)


def test_every_member_of_the_protocols_is_passed_on():
    members = {name for protocol in PROTOCOLS for name in _get_protocol_attrs(protocol)}
    assert {*MEMBERS_OF_PROTOCOLS, "forward", "new_kv_cache"} == members


def test_what_changes_in_the_network_changes_in_its_recorder():
    network = CausalNetwork(tiny("Llama"))
    recorder = record_calls(network)
    assert recorder.adapter is None
    recorder.attach_adapter(adapter_for(network.model))
    assert recorder.adapter is network.adapter is not None
    network.add_hidden_state_layers([1])
    assert recorder.hidden_state_layers == (1,)
    assert recorder.num_layers == 2, "and so does everything that is in no protocol"
