"""Describes the kernel's ``struct tcp_info`` (linux/tcp.h), to which new kernels only append."""

from __future__ import annotations

from ringtap.core.append_only_logs import Kind

AGES_START, AGES_END = 44, 60  # tcpi_last_data_sent to tcpi_last_ack_recv
INFO_BYTES = 232  # bytes of tcp_info in a record, with the ages: up to tcpi_snd_wnd (Linux 5.4)

# states of a socket (include/net/tcp_states.h); 0 marks one that has ended
ENDED, TIME_WAIT, LISTEN, NEW_SYN_RECV = 0, 6, 10, 12
STATES_WITHOUT_COUNTERS = (ENDED, TIME_WAIT, LISTEN, NEW_SYN_RECV)

TCP_INFO: tuple[tuple[str, str, str, Kind, int], ...] = (
    # name, type, unit, kind, offset
    ("tcp_state", "<u1", "", "gauge", 0),
    ("ca_state", "<u1", "", "gauge", 1),
    ("retransmits", "<u1", "timeouts in a row", "gauge", 2),
    ("probes", "<u1", "probes without answer", "gauge", 3),
    ("backoff", "<u1", "", "gauge", 4),
    ("options", "<u1", "bit set", "gauge", 5),
    ("window_scales", "<u1", "low half: sent, high half: received", "gauge", 6),
    ("delivery_flags", "<u1", "bit 0: delivery rate limited by the application", "gauge", 7),
    ("rto_us", "<u4", "us", "gauge", 8),
    ("ato_us", "<u4", "us", "gauge", 12),
    ("snd_mss_bytes", "<u4", "bytes", "gauge", 16),
    ("rcv_mss_bytes", "<u4", "bytes", "gauge", 20),
    ("unacked", "<u4", "packets", "gauge", 24),
    ("sacked", "<u4", "packets", "gauge", 28),
    ("lost", "<u4", "packets", "gauge", 32),
    ("retrans", "<u4", "packets", "gauge", 36),
    ("fackets", "<u4", "packets", "gauge", 40),
    ("pmtu_bytes", "<u4", "bytes", "gauge", 60),
    ("rcv_ssthresh_bytes", "<u4", "bytes", "gauge", 64),
    ("rtt_us", "<u4", "us", "gauge", 68),
    ("rttvar_us", "<u4", "us", "gauge", 72),
    ("snd_ssthresh", "<u4", "packets", "gauge", 76),
    ("snd_cwnd", "<u4", "packets", "gauge", 80),
    ("advmss_bytes", "<u4", "bytes", "gauge", 84),
    ("reordering", "<u4", "packets", "gauge", 88),
    ("rcv_rtt_us", "<u4", "us", "gauge", 92),
    ("rcv_space_bytes", "<u4", "bytes", "gauge", 96),
    ("total_retrans", "<u4", "packets", "counter", 100),
    ("pacing_rate_bytes_per_s", "<u8", "bytes/s", "gauge", 104),
    ("max_pacing_rate_bytes_per_s", "<u8", "bytes/s", "gauge", 112),
    ("bytes_acked", "<u8", "bytes", "counter", 120),
    ("bytes_received", "<u8", "bytes", "counter", 128),
    ("segs_out", "<u4", "packets", "counter", 136),
    ("segs_in", "<u4", "packets", "counter", 140),
    ("notsent_bytes", "<u4", "bytes", "gauge", 144),
    ("min_rtt_us", "<u4", "us", "gauge", 148),
    ("data_segs_in", "<u4", "packets", "counter", 152),
    ("data_segs_out", "<u4", "packets", "counter", 156),
    ("delivery_rate_bytes_per_s", "<u8", "bytes/s", "gauge", 160),
    ("busy_time_us", "<u8", "us", "counter", 168),
    ("rwnd_limited_us", "<u8", "us", "counter", 176),
    ("sndbuf_limited_us", "<u8", "us", "counter", 184),
    ("delivered", "<u4", "packets", "counter", 192),
    ("delivered_ce", "<u4", "packets", "counter", 196),
    ("bytes_sent", "<u8", "bytes, retransmissions included", "counter", 200),
    ("bytes_retrans", "<u8", "bytes", "counter", 208),
    ("dsack_dups", "<u4", "packets", "counter", 216),
    ("reord_seen", "<u4", "events", "counter", 220),
    ("rcv_ooopack", "<u4", "packets", "counter", 224),
    ("snd_wnd_bytes", "<u4", "bytes", "gauge", 228),
)

# time with data to send, and that in which the receiver's and the sender's full buffers limit it
BUSY_TIMES = ("busy_time_us", "rwnd_limited_us", "sndbuf_limited_us")
OFFSETS = {name: offset for name, _, _, _, offset in TCP_INFO}
UNKNOWN_RTT_US = 2**32 - 1  # round-trip time that was never measured
