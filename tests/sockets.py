"""What the kernel counted on the TCP connections of this process: what a library really moved, headers included."""

import os
import socket
import struct

_BYTES_ACKED, _BYTES_RECEIVED = 120, 128  # offsets of two u64 in Linux's struct tcp_info


def on_the_wire() -> tuple[int, int]:
    """Payload bytes (sent and acknowledged, received) over all TCP connections that are open now."""
    sent = received = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as s:
                if s.type != socket.SOCK_STREAM or s.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        except OSError:
            continue
        if len(info) >= _BYTES_RECEIVED + 8:
            sent += struct.unpack_from("Q", info, _BYTES_ACKED)[0]
            received += struct.unpack_from("Q", info, _BYTES_RECEIVED)[0]
    return sent, received
