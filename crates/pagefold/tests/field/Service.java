import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Random;
import java.util.Scanner;
import java.util.concurrent.locks.LockSupport;

/**
 * A service with a table that never changes, and some garbage all the time.
 *
 * <p>Argument: the table's size, MiB. Prints "ready". Answers "check" with "intact" or "damaged", and "pauses" with the
 * 99th percentile of how late a thread woke up since the last such question, microseconds.
 */
public final class Service {
    private static final int PART = 1 << 10;

    /** Between two wakeups of the thread that measures pauses. */
    private static final long EVERY_NS = 1_000_000;

    private static volatile byte[] garbage;

    private static final List<Long> late = new ArrayList<>();

    private Service() {}

    private static byte[] part(int number) {
        byte[] part = new byte[PART];
        new Random(number).nextBytes(part);
        return part;
    }

    private static void serve() {
        try {
            while (true) {
                garbage = new byte[32 << 10];
                Thread.sleep(100);
            }
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
        }
    }

    private static void measure() {
        while (true) {
            long before = System.nanoTime();
            LockSupport.parkNanos(EVERY_NS);
            long pause = System.nanoTime() - before - EVERY_NS;
            synchronized (late) {
                late.add(pause / 1_000);
            }
        }
    }

    private static long pauses() {
        synchronized (late) {
            Collections.sort(late);
            long pause = late.get(late.size() * 99 / 100);
            late.clear();
            return pause;
        }
    }

    private static void start(Runnable work) {
        Thread thread = new Thread(work);
        thread.setDaemon(true);
        thread.start();
    }

    private static boolean isIntact(byte[][] table) {
        for (int at = 0; at < table.length; at++) {
            if (!Arrays.equals(table[at], part(at))) {
                return false;
            }
        }
        return true;
    }

    public static void main(String[] args) {
        byte[][] table = new byte[(Integer.parseInt(args[0]) << 20) / PART][];
        for (int at = 0; at < table.length; at++) {
            table[at] = part(at);
        }
        start(Service::serve);
        start(Service::measure);
        System.out.println("ready");
        Scanner input = new Scanner(System.in);
        while (input.hasNextLine()) {
            if (input.nextLine().equals("pauses")) {
                System.out.println(pauses());
            } else {
                System.out.println(isIntact(table) ? "intact" : "damaged");
            }
        }
    }
}
