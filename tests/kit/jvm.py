"""How tests start their Java machines."""

#: They live for seconds: the second compiler, and collecting garbage on all cores, would take
#: longer than they save. Without that compiler the code cache is so small that all of Spark's
#: tests fill it, and then Java fails.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
