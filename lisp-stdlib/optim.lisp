;;; Optimizers: (param grad settings) -> (list new-param new-state …). Settings are numbers or scalar tensors;
;;; those that add a term (momentum, weight-decay) leave it out of the graph when they are the number 0.

(defun absent (setting)
  "Whether a setting is the number 0, and its term can be left out."
  (and (numberp setting) (= setting 0)))

(defun update-number ()
  "The number of this update as f32, 1 at the first: t of the papers. A scalar."
  (cast (+ (step) 1) f32))

(defun with-decay (grad param weight-decay)
  "The gradient of the loss plus weight-decay/2 |param|²: L2 regularization. The shape of param."
  (if (absent weight-decay) grad (+ grad (* weight-decay param))))

(defun decayed (param lr weight-decay)
  "param (1 - lr weight-decay): decay decoupled from the gradient (Loshchilov and Hutter 2019). The shape of param."
  (if (absent weight-decay) param (* param (- 1 (* lr weight-decay)))))

(defun moving-average (old new beta)
  "beta old + (1 - beta) new. The shape of both."
  (+ (* beta old) (* (- 1 beta) new)))

(defun adam-direction (m v b1 b2 eps)
  "The bias-corrected step of Adam from its two moments. The shape of param."
  (let* ((t (update-number))
         (correction1 (- 1 (power b1 t)))
         (correction2 (- 1 (power b2 t))))
    (/ (/ m correction1) (+ (/ (sqrt v) (sqrt correction2)) eps))))

(defoptimizer sgd (param grad &key (lr 1e-2) (momentum 0) (weight-decay 0) (nesterov false))
  :state ((velocity zeros))
  "Gradient descent with heavy-ball momentum, or Nesterov's (Sutskever et al. 2013), and L2 weight decay added to the gradient."
  (let* ((g (with-decay grad param weight-decay))
         (v (if (absent momentum) g (+ (* momentum velocity) g)))
         (direction (if nesterov (+ g (* momentum v)) v)))
    (list (- param (* lr direction)) v)))

(defoptimizer adam (param grad &key (lr 1e-3) (betas [0.9 0.999]) (eps 1e-8) (weight-decay 0))
  :state ((m zeros) (v zeros))
  "Adam (Kingma and Ba 2015), bias-corrected; weight decay is L2, added to the gradient."
  (destructuring-bind (b1 b2) betas
    (let* ((g (with-decay grad param weight-decay))
           (m (moving-average m g b1))
           (v (moving-average v (* g g) b2)))
      (list (- param (* lr (adam-direction m v b1 b2 eps))) m v))))

(defoptimizer adamw (param grad &key (lr 1e-3) (betas [0.9 0.999]) (eps 1e-8) (weight-decay 1e-2))
  :state ((m zeros) (v zeros))
  "Adam with decoupled weight decay (Loshchilov and Hutter 2019), bias-corrected as in its algorithm 2."
  (destructuring-bind (b1 b2) betas
    (let* ((t (cast (+ (step) 1) f32))
           (m (+ (* b1 m) (* (- 1 b1) grad)))
           (v (+ (* b2 v) (* (- 1 b2) (* grad grad))))
           (correction1 (- 1 (power b1 t)))
           (correction2 (- 1 (power b2 t)))
           (denominator (+ (/ (sqrt v) (sqrt correction2)) eps)))
      (list (- (* param (- 1 (* lr weight-decay)))
               (* (/ lr correction1) (/ m denominator)))
            m v))))

(defoptimizer lion (param grad &key (lr 1e-4) (betas [0.9 0.99]) (weight-decay 0))
  :state ((m zeros))
  "The sign of an interpolated momentum, with decoupled decay (Chen et al. 2023, algorithm 2)."
  (destructuring-bind (b1 b2) betas
    (list (- (decayed param lr weight-decay) (* lr (sign (moving-average m grad b1))))
          (moving-average m grad b2))))

(defoptimizer rmsprop (param grad &key (lr 1e-2) (alpha 0.99) (eps 1e-8) (momentum 0) (weight-decay 0) (centered false))
  :state ((v zeros) (average zeros) (velocity zeros))
  "The gradient over a running root mean square (Hinton 2012); :centered subtracts the running mean (Graves 2013)."
  (let* ((g (with-decay grad param weight-decay))
         (v (moving-average v (* g g) alpha))
         (average (if centered (moving-average average g alpha) average))
         (variance (if centered (- v (* average average)) v))
         (direction (/ g (+ (sqrt variance) eps)))
         (velocity (if (absent momentum) velocity (+ (* momentum velocity) direction))))
    (list (- param (* lr (if (absent momentum) direction velocity))) v average velocity)))

(defoptimizer adagrad (param grad &key (lr 1e-2) (lr-decay 0) (eps 1e-10) (weight-decay 0))
  :state ((total zeros))
  "The gradient over the root of the sum of its squares so far (Duchi et al. 2011)."
  (let* ((g (with-decay grad param weight-decay))
         (total (+ total (* g g)))
         (rate (if (absent lr-decay) lr (/ lr (+ 1 (* lr-decay (- (update-number) 1)))))))
    (list (- param (* rate (/ g (+ (sqrt total) eps)))) total)))

(defoptimizer adadelta (param grad &key (lr 1) (rho 0.9) (eps 1e-6) (weight-decay 0))
  :state ((v zeros) (accumulated zeros))
  "The gradient over its root mean square, in units of the steps taken so far (Zeiler 2012)."
  (let* ((g (with-decay grad param weight-decay))
         (v (moving-average v (* g g) rho))
         (delta (* g (/ (sqrt (+ accumulated eps)) (sqrt (+ v eps))))))
    (list (- param (* lr delta)) v (moving-average accumulated (* delta delta) rho))))

(defoptimizer adamax (param grad &key (lr 2e-3) (betas [0.9 0.999]) (eps 1e-8) (weight-decay 0))
  :state ((m zeros) (u zeros))
  "Adam with a decaying maximum in place of the root mean square (Kingma and Ba 2015, section 7.1)."
  (destructuring-bind (b1 b2) betas
    (let* ((g (with-decay grad param weight-decay))
           (m (moving-average m g b1))
           (u (max (* b2 u) (+ (abs g) eps))))
      (list (- param (* (/ lr (- 1 (power b1 (update-number)))) (/ m u))) m u))))

(defoptimizer nadam (param grad &key (lr 2e-3) (betas [0.9 0.999]) (eps 1e-8) (weight-decay 0) (momentum-decay 4e-3))
  :state ((m zeros) (v zeros) (product ones []))
  "Adam with Nesterov's momentum and its schedule (Dozat 2016). State: `product` is a scalar."
  (destructuring-bind (b1 b2) betas
    (let* ((t (update-number))
           (g (with-decay grad param weight-decay))
           (mu-at (lambda (n) (* b1 (- 1 (* 1/2 (power 0.96 (* n momentum-decay)))))))
           (mu (mu-at t))
           (next (mu-at (+ t 1)))
           (product (* product mu))
           (m (moving-average m g b1))
           (v (moving-average v (* g g) b2))
           (denominator (+ (sqrt (/ v (- 1 (power b2 t)))) eps))
           (direction (+ (* (/ (- 1 mu) (- 1 product)) g) (* (/ next (- 1 (* product next))) m))))
      (list (- param (* lr (/ direction denominator))) m v product))))

(defoptimizer radam (param grad &key (lr 1e-3) (betas [0.9 0.999]) (eps 1e-8) (weight-decay 0))
  :state ((m zeros) (v zeros))
  "Adam whose adaptive rate is rectified, and left out while its variance is unbounded (Liu et al. 2020)."
  (destructuring-bind (b1 b2) betas
    (let* ((t (update-number))
           (g (with-decay grad param weight-decay))
           (m (moving-average m g b1))
           (v (moving-average v (* g g) b2))
           (power2 (power b2 t))
           (limit (- (/ 2 (- 1 b2)) 1))
           (rho (- limit (/ (* (* 2 t) power2) (- 1 power2))))
           (safe (clamp rho :low 5))
           (rectified (sqrt (/ (* (* (- safe 4) (- safe 2)) limit) (* (* (- limit 4) (- limit 2)) safe))))
           (adaptive (/ (* rectified (sqrt (- 1 power2))) (+ (sqrt v) eps)))
           (direction (* (/ m (- 1 (power b1 t))) (where (> rho 5) adaptive 1))))
      (list (- param (* lr direction)) m v))))

(defoptimizer adafactor (param grad &key (lr 1e-2) (beta2-decay -0.8) (eps [1.1920929e-7 1e-3]) (clip 1) (weight-decay 0))
  :state ((row zeros (if (> (rank param) 1) (append (subseq (shape param) 0 (- (rank param) 1)) [1]) []))
          (column zeros (if (> (rank param) 1)
                            (append (subseq (shape param) 0 (- (rank param) 2)) [1 (dim param -1)])
                            []))
          (v zeros (if (> (rank param) 1) [] (shape param))))
  "Second moments as an outer product of row and column means (Shazeer and Stern 2018); vectors keep them whole.
The rate is relative to the root mean square of param; :clip bounds that of the update. State: [… n 1] and [… 1 m] for [… n m]."
  (let* ((matrix (> (rank param) 1))
         (t (update-number))
         (beta (- 1 (power t beta2-decay)))
         (rms (lambda (x) (sqrt (mean (* x x)))))
         (rate (* (max (second eps) (rms param)) (min lr (/ 1 (sqrt t)))))
         (squares (* grad grad))
         (row (if matrix (moving-average row (mean squares :axis -1 :keep-dims true) beta) row))
         (column (if matrix (moving-average column (mean squares :axis -2 :keep-dims true) beta) column))
         (v (if matrix v (moving-average v squares beta)))
         (estimate (if matrix
                       (/ (matmul row column) (clamp (mean row :axis -2 :keep-dims true) :low (first eps)))
                       v))
         (update (* grad (rsqrt (clamp estimate :low (* (first eps) (first eps))))))
         (bound (max 1 (/ (rms update) clip))))
    (list (- (decayed param lr weight-decay) (* (/ rate bound) update)) row column v)))

(defun newton-schulz (x &key (iterations 5) (coefficients [3.4445 -4.775 2.0315]) (eps 1e-7))
  "Near the closest semi-orthogonal matrix to x [n m]: its singular values come to about 1 (Jordan et al. 2024)."
  (destructuring-bind (a b c) coefficients
    (let* ((tall (> (dim x 0) (dim x 1)))
           (start (if tall (transpose x) x))
           (scaled (/ start (clamp (sqrt (sum (* start start))) :low eps)))
           (improve (lambda (y i)
                      (let* ((gram (matmul y (transpose y)))
                             (polynomial (+ (* b gram) (* c (matmul gram gram)))))
                        (+ (* a y) (matmul polynomial y)))))
           (done (reduce improve (range iterations) :initial-value scaled)))
      (if tall (transpose done) done))))

(defoptimizer muon (param grad &key (lr 2e-2) (momentum 0.95) (nesterov true) (weight-decay 0) (iterations 5)
                               (adam-lr 3e-4) (betas [0.9 0.95]) (eps 1e-8))
  :state ((m zeros) (v zeros (if (= (rank param) 2) [] (shape param))))
  "Momentum made orthogonal by Newton-Schulz, scaled by √max(1, out/in) (Jordan et al. 2024): for matrices [in out].
Parameters of another rank follow AdamW at :adam-lr with :betas and :eps."
  (if (= (rank param) 2)
      (let* ((m (moving-average m grad momentum))
             (direction (if nesterov (moving-average grad m (- 1 momentum)) m))
             (scale (sqrt (max 1 (/ (dim param 1) (dim param 0))))))
        (list (- (decayed param lr weight-decay)
                 (* (* lr scale) (newton-schulz direction :iterations iterations)))
              m v))
      (destructuring-bind (b1 b2) betas
        (let* ((m (moving-average m grad b1))
               (v (moving-average v (* grad grad) b2)))
          (list (- (decayed param adam-lr weight-decay) (* adam-lr (adam-direction m v b1 b2 eps))) m v)))))
