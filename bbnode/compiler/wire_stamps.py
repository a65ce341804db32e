"""What the compiler leaves on the two ends of a wire edge, and what the engine reads there.

Rule: where a Send's payload lands is stamped under the name of its data input; whoever puts
an op before a Send renames input and stamps together, through here.
"""

from __future__ import annotations

from onnx import NodeProto

from bbnode.ir import address, keys, protos


def stamp_destination(send: NodeProto, value_name: str, site: int) -> None:
    """Say where the data input of a Send lands: the value and the site on the receiver."""
    data = send.input[0]
    protos.set_meta(send, keys.DEST_SITE_NAME_PREFIX + data, value_name)
    if destination_of(send) != address.site_suffix(site):  # set_attr moves it to the end
        protos.set_attr(send, keys.DEST_SUFFIX_PREFIX + data, address.site_suffix(site))


def destination_of(send: NodeProto) -> bytes | None:
    """The `/site/<id>` bytes that a Send's data input goes to, or None."""
    suffix = protos.get_attr(send, keys.DEST_SUFFIX_PREFIX + send.input[0]) if send.input else None
    return suffix if isinstance(suffix, bytes) else None


def rewire_input(node: NodeProto, index: int, name: str) -> None:
    """Let a node read another value at one port; a Send's destination stamps follow."""
    old = node.input[index]
    node.input[index] = name
    if node.domain != keys.WIRE_DOMAIN or index != 0:
        return
    for entry in node.metadata_props:
        if entry.key == keys.DEST_SITE_NAME_PREFIX + old:
            entry.key = keys.DEST_SITE_NAME_PREFIX + name
    for attribute in node.attribute:
        if attribute.name == keys.DEST_SUFFIX_PREFIX + old:
            attribute.name = keys.DEST_SUFFIX_PREFIX + name
