"""What the compiler leaves on the two ends of a wire edge, and what the engine reads there.

Rule: where a Send's payload lands is stamped under the name of its data input; whoever puts
an op before a Send renames input and stamps together, through here.
"""

from __future__ import annotations

from bbnode.ir import address, keys, plain
from bbnode.ir.plain import Node


def stamp_destination(send: Node, value_name: str, site: int) -> None:
    """Say where the data input of a Send lands: the value and the site on the receiver."""
    data = send.input[0]
    send.metadata[keys.DEST_SITE_NAME_PREFIX + data] = value_name
    if destination_of(send) != address.site_suffix(site):  # set_attr moves it to the end
        send.set_attr(keys.DEST_SUFFIX_PREFIX + data, address.site_suffix(site))


def destination_of(send: Node) -> bytes | None:
    """The `/site/<id>` bytes that a Send's data input goes to, or None."""
    suffix = send.get_attr(keys.DEST_SUFFIX_PREFIX + send.input[0]) if send.input else None
    return suffix if isinstance(suffix, bytes) else None


def rewire_input(node: Node, index: int, name: str) -> None:
    """Let a node read another value at one port; a Send's destination stamps follow."""
    old = node.input[index]
    node.input[index] = name
    if node.domain != keys.WIRE_DOMAIN or index != 0:
        return
    stamp = keys.DEST_SITE_NAME_PREFIX + old
    if stamp in node.metadata:
        node.metadata = {
            keys.DEST_SITE_NAME_PREFIX + name if key == stamp else key: text
            for key, text in node.metadata.items()
        }
    for at, attribute in enumerate(node.attribute):
        if attribute.name == keys.DEST_SUFFIX_PREFIX + old:
            renamed = plain.renamed_attribute(attribute, keys.DEST_SUFFIX_PREFIX + name)
            node.attribute[at] = renamed
