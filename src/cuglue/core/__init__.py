"""The three ideas that carry everything: Stream, Block, RetireQueue; and the record per device that holds them."""
