"""Where pickles that 0.1 has written look for the caps of a wrapper's buckets."""

from paceline._ddp.options import Caps as Caps
