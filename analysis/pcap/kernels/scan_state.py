"""Defines the state of a scan, shared by kernels and their caller: words of an int64 array, and blocks of memory.

Words are named by their index. Offsets into the blocks are in bytes.
"""

from __future__ import annotations

# --- words of the state that the caller sets ----------------------------------------------------------------------
CONVERSATIONS = 0  # address of the rows of scan_dtypes.CONVERSATION
DIRECTIONS = 1  # address of the work areas: two per conversation, one per direction
SLOTS = 2  # address of the hash table of flows
HOLES = 3  # address of the TCP holes: MAX_HOLES per direction
MAX_ROWS = 4
CELLS_AT = 5  # address of the next cell; reset by the caller after it has taken the cells
CELLS_END = 6  # each end is the word after its begin
BIN_NS = 7
SWAPPED = 8  # 1 if the file's byte order is not the machine's
INTERFACES = 9  # address of the interfaces of the section; a pcap file has one
INTERFACE_COUNT = 10
MAX_KEPT = 11  # largest number of captured bytes that a record may have
FRAGMENTS = 12  # address of the table of first fragments
QUEUE_PAIRS = 13  # address of the rows of scan_dtypes.QUEUE_PAIR
QUEUE_PAIR_WORK = 14  # address of their work areas
QUEUE_PAIR_SLOTS = 15
PACKETS_AT = 16  # address of the next row of scan_dtypes.PACKET; 0: packets are not kept
PACKETS_END = 17
IS_END = 18  # 1 if the stream ends with the block
SEGMENTS_AT = 19  # address of the next TCP segment to be followed later; 0: they are followed at once
SEGMENTS_BEGIN = 68  # address of the first one
RUNS_AT = 70  # address of the last segment of any run; they are written backwards from the end of the same memory
CELLS_BEGIN = 69  # address of the first cell
PICKS_AT = 60  # address of the next row of scan_dtypes.PICK; 0: no packets are picked
PICKS_END = 61
BODIES_AT = 62  # address of the captured bytes of the next picked packet; each packet's are padded to four bytes
BODIES_END = 63
PICK_FROM_NS = 64  # packets from here on are picked, and only these are decoded
PICK_TO_NS = 65  # packets before it are picked
PICK_INTERFACES = 66  # number of interfaces in the stream before the section's first one
RECENT = 38  # address of the table of recent packets, of which copies are left out; 0: they count
SECRETS = 32  # four random numbers below 2^32 per scan, so that no capture can be crafted to make keys collide

# --- words of the state that the kernels set ----------------------------------------------------------------------
SLOT_MASK = 20  # number of slots in use, a power of two, minus one
ROWS = 21
BASE_BIN = 22  # of the first packet, since the epoch
BIN = 23  # of the last packet, since BASE_BIN
BIN_START_NS = 24
BIN_END_NS = 25
MIN_BIN = 26
FIRST_NS = 27
LAST_NS = 28  # the latest time seen
NEEDED = 29  # bytes needed to continue, from the place of the stop on
STOPPED = 30  # reason for the stop: one of those below
QUEUE_PAIR_ROWS = 31
JOINED_ROWS = 71  # conversations of a part that the scan of the whole knows
PICKED = 67  # address of the row of the packet that is decoded; 0: none
TAG = 36  # code of the packet's VLAN or VNI
UNTAGGED = 1
INNER_TAG = 37  # of the packet inside its tunnel

# --- counts of packets and anomalies ------------------------------------------------------------------------------
COUNTED = 72
COUNTS = (
    "packets",
    "bytes",
    "not_ip",
    "cut_by_snap",
    "malformed",
    "zero_length_ip",
    "fragments",
    "fragments_without_first",
    "time_backwards",
    "times_out_of_range",
    "without_time",
    "skipped_link_types",
    "unknown_blocks",
    "packets_over_limit",
    "queue_pairs_over_limit",
    "time_jumps",
    "network_changes",
    "without_interface",
    "set_back",
    "dropped_before_packets",
    "copies",
)
(
    N_PACKETS,
    N_BYTES,
    N_NOT_IP,  # ARP and the like
    N_CUT,  # a header that is needed is not in the file
    N_MALFORMED,  # headers that contradict themselves or the frame
    N_ZERO_LENGTH,  # no length in the IP header: the frame's is used
    N_FRAGMENTS,
    N_FIRST_MISSING,
    N_BACKWARDS,
    N_BAD_TIME,  # before 1970, or later than words can hold: treated as no time
    N_NO_TIME,  # simple packet blocks
    N_LINK,
    N_UNKNOWN_BLOCKS,
    N_OVER_LIMIT,
    N_QUEUE_PAIRS,
    N_JUMPS,  # more than a day after or before the previous packet
    N_NETWORKS,  # another VLAN or VNI than the previous packet in the same direction of a conversation
    N_NO_INTERFACE,  # the file does not describe the packet's interface
    N_SET_BACK,  # more than a minute before the latest packet
    N_DROPPED,  # by the options of the packets after them
    N_COPIES,  # of a packet before, if these are left out
) = range(COUNTED, COUNTED + len(COUNTS))
ZEROS = 120  # four words that stay 0: addresses of frames that have none
WORDS = 128

# --- reasons to stop ----------------------------------------------------------------------------------------------
MORE = 0  # all complete records of the block are processed
FULL = 1  # the caller has to empty the cells or packets first
CORRUPT = 2  # an impossible record
SECTION = 3  # a pcapng block that the caller reads: section header, interface or statistics
PASS_OVER = 4  # a block to skip, of which NEEDED bytes are still to come

# --- work area of a direction -------------------------------------------------------------------------------------
D_BIN = 0  # of the open cell; NO_BIN: none
D_PACKETS = 8  # of the open cell, as all fields up to D_PAYLOAD
D_DATA_PACKETS = 16
D_BYTES = 24
D_DATA_BYTES = 32
D_PAYLOAD = 40
D_SEGMENTS = 48  # since the start
D_LAST_NS = 56
D_NEXT = 64  # TCP: sequence number behind the highest byte seen; -1: none
D_TIMED = 72  # acknowledgement that ends the round trip being measured; -1: none
D_TIMED_NS = 80
D_SEGMENT_BYTES = 88  # least MSS of the handshake; 0: not seen
D_SYN_NS = 96  # of the SYN whose handshake is not over; 0: none
D_HOLES = 104
D_SYN = 112  # sequence number of the SYN; -1: none
D_TAG = 120  # VLAN or VNI of the last packet; 0: no packet yet
DIRECTION_BYTES = 128
NO_BIN = -(2**62)
UNKNOWN_BIN = NO_BIN + 1  # of packets without a time before the first that has one

# --- in a scan whose segments are followed later, instead of the fields of TCP
D_RUN = 64  # address of the segment that those of the run follow
D_RUN_LAST = 72  # address of the word that the next of these is appended to
D_RUN_END = 80  # sequence number behind it
D_RUN_LIMIT = 88  # largest payload of the next; 0: there is no run
D_RUN_KEY = 96  # what its segments have in common
D_FIRST_TAG = 112  # VLAN or VNI of the first packet, where D_TAG is not 0

# --- a TCP segment that is followed later -------------------------------------------------------------------------
S_FLOW, S_PAYLOAD, S_SEQUENCE, S_ACKNOWLEDGED, S_NS = 0, 4, 8, 12, 16
S_NEXT = 24  # distance in bytes to the first segment of its run, from here; the MSS of a SYN
S_MORE = 28  # number of segments of the run: they follow in order, without one of the other direction between
S_END = 32  # sequence number behind them
S_FLAGS, S_HEADER, S_FAMILY, S_CLOSED = 36, 37, 38, 39  # S_CLOSED: 1 if the window is 0
SEGMENT_BYTES = 40
R_NS, R_PAYLOAD, R_NEXT = 0, 8, 12  # a segment of a run; R_NEXT: distance to the next one, from here
RUN_BYTES = 16
LEAST_SEGMENT_BYTES = 56  # of the file: the headers of the record, of IPv4 and of TCP

# --- skipped bytes of a direction that may still arrive -----------------------------------------------------------
HOLE_FROM, HOLE_TO, HOLE_NS = 0, 8, 16
HOLE_BYTES = 24
MAX_HOLES = 4

# --- limits of times ----------------------------------------------------------------------------------------------
MAX_OUT_OF_ORDER_NS = 3_000_000  # if no handshake was seen
MAX_RTT_NS = 240_000_000_000  # both segments live 2 minutes at most (RFC 9293, 3.4.1): beyond, a clock was set

# --- a slot of the hash table of flows ----------------------------------------------------------------------------
K_REST = 8  # after the addresses: ports, protocol, kind, layer, family
K_FLOW = 16  # flow plus one; 0: free
SLOT_SHIFT = 5
FIRST_SLOTS = 2**14
SLOTS_A_ROW = 8  # at least: most searches then find their slot at once, which the processor predicts

# --- an interface -------------------------------------------------------------------------------------------------
I_LINK, I_SNAP, I_SCALE, I_BY, I_OFFSET_NS, I_MOST = 0, 8, 16, 24, 32, 40  # I_MOST: largest number of ticks that fits
TIMES, DIVIDED, POWER_OF_TWO = 0, 1, 2  # values of I_SCALE: use of I_BY to convert ticks to nanoseconds
INTERFACE_BYTES = 64
MAX_INTERFACES = 2**16

# --- a first fragment ---------------------------------------------------------------------------------------------
F_ADDRESSES, F_ID, F_FLOW, F_NS = 0, 8, 16, 24
FRAGMENT_SHIFT = 5
FRAGMENT_SLOTS = 8192
FRAGMENT_LIFE_NS = 60_000_000_000  # reassembly timeout of RFC 8200, and minimum of RFC 1122

# --- a recent packet ----------------------------------------------------------------------------------------------
P_KEY, P_NS = 0, 8
RECENT_SHIFT, RECENT_SLOTS, RECENT_WAYS = 4, 2**16, 4
COPY_NS = 1_000_000_000  # copies of a packet with an identification lie within this time
UNIDENTIFIED_COPY_NS = 1_000_000  # of one without: a segment is not sent again as soon

# --- a queue pair's work area -------------------------------------------------------------------------------------
Q_NEXT = 0  # PSN expected of the next request; -1: not known
Q_RESPONSE = 8  # the same for a response to a read
QUEUE_PAIR_WORK_BYTES = 16
MAX_QUEUE_PAIRS = 2**16
QUEUE_PAIR_SLOT_COUNT = 2**18

# --- limits -------------------------------------------------------------------------------------------------------
# no link has packets of this size; a record with a larger one is damaged. libpcap and Wireshark read up to 256 KiB of a
# packet, except for D-Bus, USB and EBHSCR (up to 128 MiB), which are not decoded here
MAX_FRAME_BYTES = 2**24
MAX_BLOCK_BYTES = 2**25  # such a frame and options
ROOM = 8  # upper bound on the cells, or packet rows, that one packet adds
FULL_CELL_BYTES = 2**31
FULL_CELL_PACKETS = 2**16 - 1
MAX_NS = 2**62  # a time after 2100, such that sums and differences of times fit a word
JUMP_NS = 86_400_000_000_000
SET_BACK_NS = 60_000_000_000  # processors that capture together write packets within seconds
NO_TIME = -1  # of a packet whose time is missing or impossible
