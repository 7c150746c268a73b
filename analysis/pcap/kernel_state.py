"""Where the kernels and their caller keep the state of a scan: words of one int64 array, and blocks of memory.

Words are named by their index. Offsets into the blocks are in bytes.
"""

from __future__ import annotations

# --- words of the state -------------------------------------------------------------------------------------------
# what the caller sets
CONVERSATIONS = 0  # address of the rows of layout.CONVERSATION
DIRECTIONS = 1  # address of the work area: two DIRECTION blocks a conversation
SLOTS = 2  # address of the hash table
MOST_ROWS = 4
CELLS_AT = 5  # where the next cell goes; set back by the caller when it has taken the cells
CELLS_END = 6
BIN_NS = 7
FORMAT = 8  # PCAP or PCAPNG
SWAPPED = 9  # the file's byte order is not the machine's
LINK = 10  # of a pcap file
TICK_NS = 11
MOST_KEPT = 12  # captured bytes a record may say it has

# what the kernels keep
SLOT_MASK = 16  # slots in use less one; a power of two
ROWS = 17
OTHERS = 18  # packets of conversations beyond the limit
BASE_BIN = 19  # of the first packet, since the epoch
BIN = 20  # of the last packet, since BASE_BIN
BIN_START_NS = 21
BIN_END_NS = 22
LEAST_BIN = 23
MOST_BIN = 24
FIRST_NS = 25
LAST_NS = 26  # the latest time seen
NEEDED = 27  # bytes from where the walk stopped until it can go on
STOPPED = 28  # why it stopped: one of the reasons below

# counts of what the capture held, in the order of COUNTS
COUNTED = 32
COUNTS = (
    "packets",
    "bytes",
    "not_ip",
    "cut_by_snap",
    "time_backwards",
    "zero_length_ip",
    "fragments",
    "malformed",
    "packets_over_limit",
)
(
    N_PACKETS,
    N_BYTES,
    N_NOT_IP,
    N_CUT,
    N_BACKWARDS,
    N_ZERO_LENGTH,
    N_FRAGMENTS,
    N_MALFORMED,
    N_OTHERS,
) = range(COUNTED, COUNTED + len(COUNTS))
WORDS = 128

# --- reasons to stop ----------------------------------------------------------------------------------------------
MORE = 0  # the block is used up as far as whole records go
CELLS_FULL = 1
CORRUPT = 2  # a record that no capture can have
PCAP, PCAPNG = 0, 1

# --- a direction's block ------------------------------------------------------------------------------------------
D_BIN = 0  # of the open cell; NO_BIN: none
D_PACKETS = 8  # of the open cell
D_DATA_PACKETS = 16
D_BYTES = 24
D_DATA_BYTES = 32
D_PAYLOAD = 40
D_SEGMENTS = 48  # since the start
D_LAST_NS = 56
DIRECTION_BYTES = 128
NO_BIN = -(2**62)

# --- a slot of the hash table -------------------------------------------------------------------------------------
K_ADDRESSES = 0
K_REST = 8  # ports, protocol, kind, layer, family
K_FLOW = 16  # plus one; 0: free
SLOT_SHIFT = 5
FIRST_SLOTS = 4096

# --- limits -------------------------------------------------------------------------------------------------------
MOST_FRAME_BYTES = 2**24  # no link has packets of this size; a record that says so is damage
CELL_MARGIN = 8 * 24  # a packet makes fewer cells than these
FULL_CELL_BYTES = 2**31
FULL_CELL_PACKETS = 2**16 - 1
