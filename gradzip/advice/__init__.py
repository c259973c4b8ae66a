"""Does compression pay, and which method is fastest? A cost model, measurements, studies, and `Auto`."""
