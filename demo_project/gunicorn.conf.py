"""Two worker processes with threads: enough to lose a race."""

workers = 2
worker_class = "gthread"
threads = 16
graceful_timeout = 5
control_socket_disable = True
accesslog = None
loglevel = "warning"
