"""In-flight buckets that exchange sums: summed over the host, sent with headers, added, and published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product
from typing import TypeAlias

from paceline.reducer.between_hosts.message_headers import HEADER_BYTES, Envelope, Message, tag_of
from paceline.reducer.between_hosts.messages import InFlightBucket, Layout, Received, Sent, Terms, aligned

_Either: TypeAlias = "Sent | Received"


class InFlightSums(InFlightBucket):
    def __init__(self, terms: Terms, bucket: int, room: Message, joined: Sequence[Message]) -> None:
        super().__init__(terms, bucket)
        self._joined = joined
        self._own_blocks = _blocks_of(terms, terms.host)
        # The weight of each block in this backward, as far as known.
        self._weights = [0.0] * len(terms.blocks.blocks)
        self._own: list[Sent] = []  # sums of this host's blocks, in the order in which they are sent
        self._arriving: list[Received] = []  # in the first round
        self._added: list[Sent] = []  # sums over all hosts of this host's part, sent in the second round
        self._later: list[Received] = []  # in the second round
        # For each piece of this host's part, the messages of all blocks, in the order of the blocks.
        self._pieces: list[list[_Either]] = []
        self._lay_out(Layout(room))

    @staticmethod
    def room_bytes(terms: Terms, bucket: int) -> int:
        route, own, num_blocks = terms.routes[bucket], _blocks_of(terms, terms.host), len(terms.blocks.blocks)
        report = max(map(terms.bytes_of_reports, range(terms.num_hosts)))

        def size(pieces: Sequence[range]) -> int:
            payloads = (terms.sums.nbytes(bucket, len(piece)) for piece in pieces)
            return sum(aligned(HEADER_BYTES + payload + report) for payload in payloads)

        mine, everything = size(route.part_of(terms.host)), sum(map(size, route.parts))
        first = len(own) * everything + (num_blocks - len(own)) * mine
        return first if route.is_one_round else first + everything  # with the second round's, of all parts

    @staticmethod
    def num_coming(terms: Terms, bucket: int) -> int:
        route = terms.routes[bucket]
        num = 0
        for other in terms.others:
            num += len(_sent_by(terms, other, route.part_of(terms.host)))
            num += 0 if route.is_one_round else len(route.parts[other])
        return num

    def begin(self, number: int) -> None:
        super().begin(number)
        self._weights[:] = [0.0] * len(self._weights)

    def receive(self) -> None:
        self._receive_all(chain(self._arriving, self._later))

    def send(
        self, note_nonfinite: Callable[[int, range], None], make_report: Callable[[], bytes] | None
    ) -> None:
        bucket, terms = self.bucket, self._terms
        core, sums, blocks = terms.core, terms.sums, terms.blocks.blocks
        for block in self._own_blocks:
            self._weights[block] = core.total_weight(blocks[block].local_ranks)
        waiting: list[Sent] = []  # messages that wait for the reports
        for message in self._own:
            weight, elements, payload = self._weights[message.block], message.elements, message.payload
            local_ranks = blocks[message.block].local_ranks
            room = sums.room(0, bucket, payload)
            if elements and not core.sum(bucket, elements.start, len(elements), local_ranks, room):
                note_nonfinite(bucket, elements)
            sums.write(0, bucket, elements, payload, weight)
            if message.reports is not None:
                waiting.append(message)
            else:
                self._send(message, weight)
        if make_report is not None:
            reports = make_report()
            for message in waiting:
                message.put_reports(reports)
                self._send(message, self._weights[message.block])

    def first_round(self) -> None:
        bucket, terms = self.bucket, self._terms
        total = 0.0
        for piece, messages in enumerate(self._pieces):
            elements = messages[0].elements
            found = []
            for message in messages:
                block = message.block
                if isinstance(message, Received):
                    if piece == 0:
                        self._weights[block] = self._arrived(message)
                    else:
                        self._arrived_later(message, self._weights[block])
                weight = self._weights[block]
                found.append(terms.sums.read(bucket, len(elements), message.payload, weight, block))
            if piece == 0:
                total = terms.blocks.add(self._weights)
            found = self._join(found, len(elements)) if elements else found
            if self.is_one_round:
                self._publish(elements, found, total)
            else:
                added = self._added[piece]
                if elements:
                    room = terms.sums.room(1, bucket, added.payload)
                    terms.core.add_sums(bucket, found, len(elements), room)
                terms.sums.write(1, bucket, elements, added.payload, total)
                self._send(added, total)

    def second_round(self) -> None:
        bucket, terms = self.bucket, self._terms
        total = terms.blocks.add(self._weights)
        for message in chain[_Either](self._added, self._later):
            if isinstance(message, Received):
                self._arrived(message)
            elements = message.elements
            # This host's own part is decoded, too, so that it equals what the others read.
            sums = terms.sums.read(bucket, len(elements), message.payload, total, 0)
            self._publish(elements, [sums], total)

    def silent(self) -> Iterable[int]:
        return [
            message.host
            for message in chain(self._arriving, self._later)
            if not message.envelope.has_begun_to_come(self.number)
        ]

    def _join(self, sums: list[int], count: int) -> list[int]:
        """Add in steps, but return the two operands of the last one; without steps, return all sums."""
        steps = self._terms.blocks.steps
        if not steps:
            return sums
        found = list(sums)
        for (left, right), room in zip(steps, self._joined):
            address = int(room.ctypes.data)
            self._terms.core.add_sums(self.bucket, [found[left], found[right]], count, address)
            found.append(address)
        left, right = steps[-1]
        return [found[left], found[right]]

    def _publish(self, elements: range, sums: list[int], total: float) -> None:
        bucket, terms = self.bucket, self._terms
        if elements and not terms.core.publish(bucket, elements.start, len(elements), sums, total):
            terms.on_overflow(bucket, elements)

    # --- laying out ---

    def _lay_out(self, layout: Layout) -> None:
        terms = self._terms
        route, host = terms.routes[self.bucket], terms.host
        one_round, mine = route.is_one_round, route.part_of(host)
        own: dict[int, list[Sent]] = {}
        # This rank's own part comes last, because no rank waits for it.
        for part in [0] if one_round else [*terms.others, host]:
            to = terms.others if one_round else [part] if part != host else []
            own[part] = list(self._lay_out_sent(layout, 0, _sent_by(terms, host, route.parts[part]), to))
            self._own += own[part]
        arriving: dict[int, list[Received]] = {}
        for other in terms.others:
            coming = _sent_by(terms, other, mine)
            arriving[other] = list(self._lay_out_received(layout, other, 0, coming))
            self._arriving += arriving[other]
            if not one_round:
                theirs = [(0, elements) for elements in route.parts[other]]
                self._later += self._lay_out_received(layout, other, 1, theirs)
        if not one_round:
            added = [(0, elements) for elements in mine]
            self._added = list(self._lay_out_sent(layout, 1, added, terms.others))
        for piece in range(len(mine)):
            row: list[_Either] = []
            for number, block in enumerate(terms.blocks.blocks):
                index = _blocks_of(terms, block.host).index(number) * len(mine) + piece
                from_own = own[0 if one_round else host]
                row.append(from_own[index] if block.host == host else arriving[block.host][index])
            self._pieces.append(row)

    def _lay_out_sent(
        self, layout: Layout, phase: int, going: Sequence[tuple[int, range]], to: Sequence[int]
    ) -> Iterator[Sent]:
        terms = self._terms
        for piece, (block, elements) in enumerate(going):
            reports = self._reports_bytes(terms.host, phase, piece, len(going))
            memory, address = self._take(layout, elements, reports)
            envelope = Envelope(memory, terms.generation, self.bucket, phase, terms.host, piece)
            message = Sent(block, elements, memory, address + HEADER_BYTES, envelope)
            message.reports = memory[len(memory) - reports :] if reports else None
            tag = tag_of(self.bucket, phase, piece, terms.generation)
            message.ways = [(host, terms.transport.sending(host, memory, tag)) for host in to]
            yield message

    def _lay_out_received(
        self, layout: Layout, host: int, phase: int, coming: Sequence[tuple[int, range]]
    ) -> Iterator[Received]:
        terms = self._terms
        for piece, (block, elements) in enumerate(coming):
            reports = self._reports_bytes(host, phase, piece, len(coming))
            memory, address = self._take(layout, elements, reports)
            envelope = Envelope(memory, terms.generation, self.bucket, phase, host, piece)
            tag = tag_of(self.bucket, phase, piece, terms.generation)
            begin = terms.transport.receiving(host, memory, tag)
            message = Received(host, block, elements, memory, address + HEADER_BYTES, envelope, begin)
            message.reports = memory[len(memory) - reports :] if reports else None
            yield message

    def _take(self, layout: Layout, elements: range, reports: int) -> tuple[Message, int]:
        payload = self._terms.sums.nbytes(self.bucket, len(elements))
        return layout.take(HEADER_BYTES + payload + reports)

    def _reports_bytes(self, host: int, phase: int, piece: int, num: int) -> int:
        """The size of the reports, which are in the last message of the first round; 0 for other messages."""
        has_reports = self.has_report and phase == 0 and piece == num - 1
        return self._terms.bytes_of_reports(host) if has_reports else 0


def _blocks_of(terms: Terms, host: int) -> list[int]:
    return [number for number, block in enumerate(terms.blocks.blocks) if block.host == host]


def _sent_by(terms: Terms, host: int, pieces: Sequence[range]) -> list[tuple[int, range]]:
    """What a host sends of a part in the first round: pairs of a block and its elements."""
    return list(product(_blocks_of(terms, host), pieces))
