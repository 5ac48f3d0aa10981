"""What every floor uses: names, clocks, identity, threads, transactions, log fields."""
