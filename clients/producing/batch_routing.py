"""How a batch is cut into pieces, one for each partition."""

from __future__ import annotations

from qb.clients.producing.message_notes import MessageNote
from qb.clients.producing.send_batch import SendBatch, SendPiece
from qb.clients.protocol.publish_frames import PublishForm


def pieces_of(batch: SendBatch, plain: MessageNote, count: int, turn: int) -> list[SendPiece]:
    """Return what to send for a batch, in the order of its messages in each partition.

    In a topic with one partition, or of which it is not known how many there are, a batch is one piece: the broker does
    the routing. Else the messages without a key go to the partition whose turn it is.
    """
    notes, bodies = batch.all_notes(), batch.bodies
    everything = range(len(bodies))
    if notes is None:
        partition, form = plain.routed(count, turn) if count > 1 else (None, plain.form)
        return [SendPiece(batch, partition, everything, form, bodies)]
    if count <= 1:
        return [SendPiece(batch, None, everything, [(note or plain).form for note in notes], bodies)]
    found: dict[int, tuple[list[int], list[PublishForm]]] = {}
    for index, note in enumerate(notes):
        partition, form = (note or plain).routed(count, turn)
        if partition not in found:
            found[partition] = [], []
        indexes, forms = found[partition]
        indexes.append(index)
        forms.append(form)
    return [
        SendPiece(batch, partition, indexes, forms, [bodies[index] for index in indexes])
        for partition, (indexes, forms) in found.items()
    ]
