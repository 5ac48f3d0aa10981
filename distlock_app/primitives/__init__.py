"""What every layer uses: names, clocks, identity, threads, transactions, log fields."""
