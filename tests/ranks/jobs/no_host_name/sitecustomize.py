"""Has the lookup of a host's address take for ever."""

import socket
import time

socket.getaddrinfo = lambda *words, **options: time.sleep(300)
